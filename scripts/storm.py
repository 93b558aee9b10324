"""A storm on one LLM: threads, an asyncio loop and a trio loop do everything at random.

    python scripts/storm.py --seconds 300

A tiny random Llama in a pool that is too small for all of them. In the end every branch that
survived is scored by a second LLM that does nothing else, and must agree with it; no error but the
documented ones may have come up, no block may be in use, and no thread may be left.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import anyio

from cotrt import (
    LLM,
    BeamSearchParams,
    Branch,
    BranchBusyError,
    BranchPrunedError,
    InvalidRequestError,
    KVCacheExhaustedError,
    PromptTooLongError,
    SamplingParams,
)
from cotrt.testing import CharTokenizer

VOCAB = 128
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
PREFIXES = [
    "In the beginning there was a tree.",
    "In the beginning there was a seed, and it",
    "x" * 50,
    "",
]
DOCUMENTED = (
    BranchBusyError,
    BranchPrunedError,
    PromptTooLongError,
    KVCacheExhaustedError,
    InvalidRequestError,
    CancelledError,
    TimeoutError,
)
MAX_SURVIVORS = 2000


@dataclasses.dataclass
class Storm:
    """What all workers share.

    Attributes:
        branches: some living branches, by which workers meet.
        survivors: tokens and log-probabilities of branches that lived to be looked at.
        counts: how often each thing was done.
        failures: errors that should not be.
    """

    llm: LLM
    deadline: float
    branches: list[Branch] = dataclasses.field(default_factory=list)
    survivors: list[tuple[list[int], list[float | None]]] = dataclasses.field(default_factory=list)
    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    failures: list[BaseException] = dataclasses.field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.deadline or bool(self.failures)

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def keep(self, branch: Branch, rng: random.Random) -> None:
        """Remember a branch as it is, for the comparison, and show it to the other workers."""
        with branch.fork()[0] as still:
            record = (still.token_ids, still.logprobs)
        if len(self.survivors) < MAX_SURVIVORS:
            self.survivors.append(record)
        else:
            self.survivors[rng.randrange(MAX_SURVIVORS)] = record
        self.branches.append(branch)
        if len(self.branches) > 12:
            self.branches.pop(rng.randrange(12))


def start(storm: Storm, rng: random.Random) -> Branch:
    """A new root, or a fork of somebody's branch."""
    if storm.branches and rng.random() < 0.6:
        branch = rng.choice(storm.branches)
        at = rng.randrange(1, len(branch) + 1) if rng.random() < 0.3 else None
        return branch.fork(at=at)[0]
    return storm.llm.branch(rng.choice(PREFIXES) + rng.choice(["", "a", "bc " * 9, "!"]))


def params(rng: random.Random) -> SamplingParams:
    options: dict[str, Any] = {"max_tokens": rng.randrange(1, 30), "ignore_eos": rng.random() < 0.5}
    if rng.random() < 0.3:
        options |= {"seed": rng.randrange(100), "top_k": rng.choice([0, 1, 40])}
    if rng.random() < 0.3:
        options |= {"stop": ["e", "xy"], "presence_penalty": 1.0, "logprobs": 2}
    return SamplingParams(**options, priority=rng.randrange(3))


def edit(storm: Storm, branch: Branch, rng: random.Random) -> None:
    """Verbs that need no model."""
    what = rng.randrange(7)
    if what == 0:
        branch.extend(rng.choice(["and", " or", "?" * 20]))
    elif what == 1:
        branch.truncate(rng.randrange(1, len(branch) + 1), same_draws=rng.random() < 0.3)
    elif what == 2:
        branch.fork(3)
    elif what == 3 and storm.branches:
        storm.branches.pop(rng.randrange(len(storm.branches))).prune()
    elif what == 4:
        branch.keep(0.01)
    elif what == 5:
        assert len(branch.logprobs) >= 0 and branch.kv.num_tokens >= 0 and repr(branch)
        assert branch.parent is None or branch.parent.children is not None
    else:
        branch.close()


def work_in_thread(storm: Storm, rng: random.Random) -> None:
    """One small program of blocking code."""
    llm, what = storm.llm, rng.randrange(9)
    storm.count(f"thread {what}")
    if what == 0:
        llm.generate([rng.choice(PREFIXES) + "go"] * 2, SamplingParams(n=2, max_tokens=9))
    elif what == 1:
        llm.beam_search("beams " * 3, BeamSearchParams(beam_width=3, max_tokens=6))
    elif what == 2:
        with llm.start_chat("Be brief.") as chat:
            for _ in range(3):
                chat.send("hello", max_tokens=rng.randrange(1, 9)).result()
            storm.keep(chat.fork()[0].branch, rng)
    elif what == 3:
        with start(storm, rng).fork(3) as branches:
            handle = branches.generate(params(rng))
            next(iter(handle[0]), None)
            if rng.random() < 0.5:
                handle.cancel()
    elif what == 4:
        branch = start(storm, rng)
        branch.score(["yes", "no", "maybe so"], given=" is it? ").result()
        branch.choose(["yes", "no"], given=" so ").result()
        storm.keep(branch, rng)
    elif what == 5:
        start(storm, rng).generate(params(rng)).result(timeout=rng.choice([0, 1e-3]))
    else:
        branch = start(storm, rng)
        for _ in range(3):
            branch.generate(params(rng)).result()
            if rng.random() < 0.4:
                edit(storm, branch, rng)
        storm.keep(branch, rng)


async def work_in_loop(storm: Storm, rng: random.Random) -> None:
    """One small program of async code."""
    branch, what = start(storm, rng), rng.randrange(5)
    storm.count(f"loop {what}")
    if what == 0:
        with anyio.move_on_after(rng.random() * 0.05):
            await branch.generate(params(rng))
    elif what == 1:
        async for _ in branch.generate(params(rng)):
            if rng.random() < 0.05:
                break
        edit(storm, branch, rng)
    elif what == 2:
        async with anyio.create_task_group() as group:
            for child in branch.fork(3):
                group.start_soon(_grow, storm, child, params(rng), rng)
            if rng.random() < 0.3:
                group.cancel_scope.cancel()
    elif what == 3:
        await branch.fork(4).generate(params(rng))
    else:
        await branch.generate(params(rng))
        await branch.score(["yes", "no"], given="?")
        storm.keep(branch, rng)


async def _grow(storm: Storm, branch: Branch, how: SamplingParams, rng: random.Random) -> None:
    try:
        await branch.generate(how)
        storm.keep(branch, rng)
    except DOCUMENTED:
        storm.count("error")


def thread(storm: Storm, seed: int) -> None:
    rng = random.Random(seed)
    while not storm.is_over:
        try:
            work_in_thread(storm, rng)
        except DOCUMENTED:
            storm.count("error")
        except BaseException as error:
            storm.failures.append(error)


async def loop(storm: Storm, seed: int) -> None:
    async def task(number: int) -> None:
        rng = random.Random(f"{seed} {number}")
        while not storm.is_over:
            try:
                await work_in_loop(storm, rng)
            except DOCUMENTED:
                storm.count("error")
            except Exception as error:
                storm.failures.append(error)

    async with anyio.create_task_group() as group:
        for number in range(3):
            group.start_soon(task, number)


def make_model(folder: Path) -> Path:
    """Two random layers; weights large enough for logits to depend on every position."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=2,
        bos_token_id=1,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(std=0.3)
    model.save_pretrained(folder)
    return folder


def compare(storm: Storm, llm: LLM) -> int:
    """Score every survivor alone; the number of tokens that were compared.

    Raises:
        AssertionError: a log-probability differs by more than rounding can make it.
    """
    tokens = 0
    for ids, logprobs in storm.survivors:
        if len(ids) < 2:
            continue
        with llm.branch(ids[:1]) as branch:
            alone = branch.score(ids[1:]).result().logprobs
        for position, logprob in enumerate(logprobs[1:]):
            if logprob is not None:
                tokens += 1
                difference = abs(logprob - alone[position])
                assert difference < 2e-3, f"{ids} differs by {difference} at {position + 1}"
    return tokens


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=8)
    options = parser.parse_args()
    say: Callable[[str], Any] = lambda text: sys.stdout.write(text + "\n")  # noqa: E731

    with tempfile.TemporaryDirectory() as folder:
        arguments = {
            "model": make_model(Path(folder)),
            "tokenizer": CharTokenizer(VOCAB),
            "chat_template": TEMPLATE,
            "dtype": "float32",
            "num_threads": 1,
        }
        llm = LLM(**arguments, kv_cache_memory_bytes=56 * 16 * 2 * 2 * 16 * 4, max_num_seqs=24)
        storm = Storm(llm, time.monotonic() + options.seconds)
        threads = [
            threading.Thread(target=thread, args=(storm, options.seed * 1000 + number))
            for number in range(options.threads)
        ]
        for backend in ("asyncio", "trio"):
            run = {"backend": backend}
            threads.append(
                threading.Thread(target=anyio.run, args=(loop, storm, options.seed), kwargs=run)
            )
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        say(" ".join(f"{name}: {count};" for name, count in sorted(storm.counts.items())))
        for failure in storm.failures:
            raise failure
        storm.branches.clear()
        gc.collect()
        while llm.metrics["running"] or llm.metrics["waiting"]:  # work whose handles were dropped
            time.sleep(0.01)
        memory, metrics = llm.memory(), llm.metrics
        say(f"{memory}\n{metrics}")
        llm._runtime.engine.check_invariants()
        assert memory.in_use == 0, f"{memory.in_use} blocks are in use"
        llm.close()
        with LLM(**arguments, kv_cache_memory_bytes=1 << 24, enable_prefix_caching=False) as alone:
            tokens = compare(storm, alone)
        say(f"{len(storm.survivors)} branches and {tokens} sampled tokens equal a solo run")
    left = [each.name for each in threading.enumerate() if each.name.startswith("cotrt")]
    assert not left, f"threads are left: {left}"
    return 0


if __name__ == "__main__":
    sys.exit(main())
