"""Scorers: sync and async, raising, without a number, asking the model, a second model."""

from __future__ import annotations

import sys

import anyio
import pytest
from search_helpers import ALGORITHMS, EOS, PARAMS, PATHS, PROMPT, probabilities, run, small_llm

from cotrt import LLM, InvalidRequestError, search
from cotrt.testing import ScriptedModel

SCORED = [name for name, (_, options) in ALGORITHMS.items() if "score" in options]


class JudgeError(Exception):
    pass


def raising(node: search.Node) -> float:
    raise JudgeError("no opinion")


async def raising_later(node: search.Node) -> float:
    await anyio.sleep(0.001 * node.id)
    raise JudgeError(f"no opinion on {node.id}")


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("score", [raising, raising_later])
@pytest.mark.parametrize("name", SCORED)
def test_a_raising_scorer_is_heard_and_leaks_nothing(name: str, score, backend: str) -> None:
    fn, options = ALGORITHMS[name]
    with small_llm() as llm:
        root = llm.branch(PROMPT)
        root.score(" x").result()
        in_use = llm.memory().in_use
        with pytest.raises(JudgeError, match="no opinion") as caught:
            run(fn, root, params=PARAMS, backend=backend, **options | {"score": score})
        if sys.version_info >= (3, 11):
            assert caught.value.__notes__[0].startswith("raised by score on node ")
        assert llm.memory().in_use == in_use and root.alive


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "high"])
@pytest.mark.parametrize("name", SCORED)
def test_what_is_no_number_is_refused(name: str, value) -> None:
    fn, options = ALGORITHMS[name]
    with small_llm() as llm:
        with pytest.raises(InvalidRequestError, match=r"score gave .* for node \d+"):
            run(fn, llm, PROMPT, params=PARAMS, **options | {"score": lambda node: value})
        assert llm.memory().in_use == 0


def test_async_scorers_of_a_wave_run_at_once() -> None:
    active, most = 0, 0

    async def score(node: search.Node) -> float:
        nonlocal active, most
        active += 1
        most = max(most, active)
        await anyio.sleep(0.01)
        active -= 1
        return node.path_text.count("t")

    with small_llm() as llm:
        result = run(search.best_of_n, llm, PROMPT, n=9, score=score, params=PARAMS)
        assert most == 9
        assert result.best.score == max(c.score for c in result.candidates if c.finished)


def yes_or_no_model() -> ScriptedModel:
    """Writes one of PATHS; asked whether it is right, says yes to the treasure."""

    def next_probs(ids: list[int]) -> dict[int, float]:
        text = "".join(map(chr, ids))
        if "Right:" in text or "Yes or No:" in text:
            yes = 0.9 if "treasure" in text else 0.2
            return probabilities({" Yes": yes, " No": 1 - yes}, text.rpartition(":")[2])
        return probabilities(PATHS, text.rpartition("?")[2])

    return ScriptedModel(next_probs, vocab_size=128, eos_token_id=EOS)


def test_the_model_is_asked_in_one_batch_and_nothing_is_sent_twice() -> None:
    with small_llm(yes_or_no_model()) as llm:
        root = llm.branch(PROMPT)
        result = run(search.best_of_n, root, n=8, score=search.ask("\nRight:"), params=PARAMS)
        assert "treasure" in result.answer and abs(result.best.score - 0.9) < 1e-6
        assert {round(c.score, 6) for c in result.candidates} <= {0.9, 0.2}
        asked = 2 * len("\nRight:") + len(" Yes") + len(" No")
        assert result.usage.prompt_tokens_computed <= len(PROMPT) + 8 * asked


def test_an_llm_is_a_judge() -> None:
    with small_llm() as llm, LLM(yes_or_no_model(), kv_cache_memory_bytes=2**16) as judge:
        result = run(search.best_of_n, llm, PROMPT, n=8, score=judge, params=PARAMS)
        assert "treasure" in result.answer and abs(result.best.score - 0.9) < 1e-6
        assert judge.memory().in_use == 0 and llm.memory().in_use == 0
    with small_llm(yes_or_no_model()) as llm:
        result = run(search.best_of_n, llm, PROMPT, n=8, score=llm, params=PARAMS)
        assert "treasure" in result.answer
        assert llm.memory().in_use == 0


def test_a_judge_reads_every_text_once() -> None:
    with small_llm() as llm, LLM(yes_or_no_model(), kv_cache_memory_bytes=2**16) as other:
        with search.Judge(other, "\nRight:", instructions="Be strict.") as judge:
            result = run(
                search.step_beam_search,
                llm,
                PROMPT,
                width=2,
                branching=3,
                score=judge,
                params=PARAMS,
            )
            nodes = result.tree.nodes
            scored = [node for node in nodes if node.score is not None]
            texts = len("Be strict.") + len(PROMPT) + sum(len(node.text) for node in scored)
            asked = len(scored) * (2 * len("\nRight:") + len(" Yes") + len(" No"))
            assert other.metrics["prompt_tokens_computed"] <= texts + asked
        assert other.memory().in_use == 0


def test_a_branch_that_is_gone_is_a_clear_error() -> None:
    with small_llm() as llm:
        result = run(search.best_of_n, llm, PROMPT, n=2, params=PARAMS)
        with pytest.raises(InvalidRequestError, match="has no branch"):
            _ = result.tree.nodes[1].branch
