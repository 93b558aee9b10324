"""What a request leaves is freed when it is dropped, not when Python next looks for cycles."""

from __future__ import annotations

import contextlib
import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError

import pytest
from isolation import shared_fixture

from cotrt import LLM, BeamSearchParams, CotrtError
from cotrt.testing import ScriptedModel


@shared_fixture()
def llm() -> Iterator[LLM]:
    model = ScriptedModel(
        lambda ids: {97 + len(ids) % 20: 2.0, 98: 1.0}, vocab_size=128, eos_token_id=0
    )
    with LLM(model) as made:
        yield made


def generate(llm: LLM) -> None:
    with llm.branch("hello") as branch:
        work = branch.generate(max_tokens=5, temperature=1.0, logprobs=2, stop="zz")
        assert len("".join(chunk.text for chunk in work)) == 5
        assert work.result().text


def generate_on_forks(llm: LLM) -> None:
    with llm.branch("hello") as branch:
        branch.fork(3).generate(max_tokens=5).result()
        [child.generate(max_tokens=3).result() for child in branch.fork(2)]


def score_and_choose(llm: LLM) -> None:
    with llm.branch("hello") as branch:
        branch.score(["yes", "no"], given=" so").result()
        branch.choose(["yes", "no"], given=" so").result()


def cancel(llm: LLM) -> None:
    with llm.branch("hello") as branch:
        works = branch.fork(2).generate(max_tokens=400)
        works.cancel()
        works.result()
        choice = branch.choose(["yes", "no"])
        choice.cancel()
        with contextlib.suppress(CancelledError):
            choice.result()


def prune(llm: LLM) -> None:
    branch = llm.branch("hello")
    work = branch.generate(max_tokens=400)
    branch.prune()
    with contextlib.suppress(CotrtError):
        work.result()


def submit(llm: LLM) -> None:
    llm.submit(["hello", "you"]).result()
    llm.beam_search("hello", BeamSearchParams(beam_width=3, max_tokens=4))


def chat(llm: LLM) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with llm.start_chat("Be brief.", chat_template=template) as each:
        each.send("hello", max_tokens=4).result()


@pytest.mark.parametrize(
    "use", [generate, generate_on_forks, score_and_choose, cancel, prune, submit, chat]
)
def test_nothing_is_left_for_the_collector(use: Callable[[LLM], None], llm: LLM) -> None:
    use(llm)  # what is made once, is made
    gc.collect()
    gc.disable()
    try:
        use(llm)
        deadline = time.monotonic() + 30
        while (llm.metrics["running"] or llm.metrics["waiting"]) and time.monotonic() < deadline:
            time.sleep(0.01)
        llm.memory()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = Counter(
            type(each).__qualname__
            for each in gc.garbage
            if type(each).__module__.startswith("cotrt")
        )
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not left
