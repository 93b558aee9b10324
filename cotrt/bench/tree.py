"""`python -m cotrt.bench tree`: what the tree costs by itself, with a model that costs nothing.

Three tables: the tree's own operations against the length of the context and the number of other
branches; the call ``b.fork()`` with the engine idle; and a decode step of many branches, which is
schedule, plan and update, for neither the model nor the sampler takes time here.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from cotrt.engine.engine import Engine
from cotrt.engine.model_runner import ModelRunner, StepResult
from cotrt.engine.state import GenerationState, TokenSequence
from cotrt.options.sampling import SamplingParams
from cotrt.plan import KVShape, UInt8
from cotrt.testing import CharTokenizer

if TYPE_CHECKING:
    import torch

    from cotrt.plan import StepPlan

_VOCAB = 1 << 15
_BLOCK_SIZE = 16


def main(argv: Sequence[str]) -> int:
    """Measure and print.

    Returns:
        The exit code, 0.
    """
    parser = argparse.ArgumentParser(
        prog="python -m cotrt.bench tree", description="The tree's own cost, without a model."
    )
    parser.add_argument("--steps", type=int, default=160, help="decode steps a measurement")
    parser.add_argument("--branches", type=int, default=256, help="branches that decode")
    parser.add_argument("--reps", type=int, default=3, help="measurements of the decode step")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args(argv)
    report = {
        "operations": [
            measure_operations(context, others)
            for context, others in ((1_000, 10), (100_000, 10), (1_000, 10_000), (100_000, 10_000))
        ],
        "fork_call_us": measure_fork_call(),
        "decode": [measure_decode(options.branches, options.steps) for _ in range(options.reps)],
    }
    print(tables(report))
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n")
    return 0


class NullModel:
    """A model that computes nothing."""

    backend_name = "null"
    kv_bytes_per_token = 4
    vocab_size = _VOCAB
    max_model_len = 1 << 20
    kv_shape = KVShape(1, 1, 1, 1, "int32")
    fingerprint = "null"
    eos_token_ids = frozenset({0})
    tokenizer = CharTokenizer(_VOCAB)
    # As of a model with 8 KV heads of 128 in bfloat16 and 32 query heads.
    plan_options: ClassVar[dict[str, int]] = {
        "kv_bytes_per_token": 4096,
        "partial_bytes_per_row": 33024,
    }

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        """Nothing is kept."""

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Nothing is kept."""

    def read_blocks(self, blocks: Sequence[int]) -> UInt8:
        """Nothing is kept."""
        return np.zeros((len(blocks), _BLOCK_SIZE * self.kv_shape.token_bytes), np.uint8)

    def write_blocks(self, blocks: Sequence[int], records: UInt8) -> None:
        """Nothing is kept."""

    def run(self, step: StepPlan) -> torch.Tensor:
        """Never asked: `NullRunner` stands before it."""
        raise NotImplementedError


class NullRunner(ModelRunner):
    """Random tokens, at no cost: what is left of a step is schedule, plan and update."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, processed_logprobs=False)
        self._random = np.random.default_rng(0)

    def run(self, step: Any, batch: Any, num_top: list[int]) -> StepResult:
        """Tokens that were drawn by nobody."""
        from cotrt.sampling.sampler import SampleOutput

        count = len(step.draws)
        drawn = SampleOutput(
            self._random.integers(1, _VOCAB, count, dtype=np.int32),
            np.zeros(count, np.float32),
            np.zeros(count, np.bool_),
        )
        return StepResult(drawn, [], [])


def null_engine(num_tokens: int, *, max_num_seqs: int = 256) -> Engine:
    """An engine without a thread whose pool holds `num_tokens`."""
    model: Any = NullModel()
    engine = Engine(
        model,
        num_blocks=-(-num_tokens // _BLOCK_SIZE),
        block_size=_BLOCK_SIZE,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=1 << 14,
    )
    engine._runner = NullRunner(model)
    return engine


def generate(engine: Engine, seq: TokenSequence, count: int) -> GenerationState:
    """Start a generate of `count` tokens."""
    state = GenerationState(
        params=SamplingParams(max_tokens=count, ignore_eos=True),
        seq=seq,
        start=seq.length,
        max_length=seq.length + count,
        min_length=0,
        eos_ids=frozenset(),
        stop_ids=frozenset(),
        seed=seq.seed,
        epoch=seq.epoch,
    )
    engine.start_generation(state)
    return state


def computed(engine: Engine, seq: TokenSequence) -> None:
    """Compute all of `seq`'s tokens, and one more is drawn."""
    generate(engine, seq, 1)
    while engine.scheduler.has_work:
        engine.step()


def timed(call: Callable[[], Any], repetitions: int) -> float:
    """Median microseconds of one call."""
    found = []
    gc.disable()
    try:
        for _ in range(repetitions):
            start = time.perf_counter()
            call()
            found.append(time.perf_counter() - start)
    finally:
        gc.enable()
    return statistics.median(found) * 1e6


def measure_operations(context: int, others: int, repetitions: int = 300) -> dict[str, Any]:
    """Fork, prune and append at the end of `context` tokens, beside `others` live branches."""
    engine = null_engine(context + 64 * others + 100_000)
    tree = engine.tree
    root = engine.table.new_root([1 + i % 1000 for i in range(context)])
    computed(engine, root)
    kept = [engine.table.fork(root) for _ in range(others)]
    children: list[TokenSequence] = []
    fork = timed(lambda: children.append(engine.table.fork(root)), repetitions)
    for child in children:  # each with a token of its own, so that there is a block to give back
        engine.table.extend(child, [1])
        tree.reserve(child, 1)
        tree.commit(child, 1)
    append_to = children[-1]

    def append() -> None:
        append_to.span.ids.append(7)
        tree.reserve(append_to, 1)
        tree.commit(append_to, 1)

    append_us = timed(append, repetitions)
    prune = timed(lambda: engine.table.prune(children.pop()), repetitions)
    assert len(kept) == others
    return {
        "context": context,
        "others": others,
        "fork_us": fork,
        "append_us": append_us,
        "prune_us": prune,
    }


def measure_fork_call(repetitions: int = 2000) -> float:
    """Median microseconds of ``b.fork()``, the engine's thread idle."""
    from cotrt import LLM

    with LLM(NullModel(), kv_cache_memory_bytes=1 << 20) as llm:
        branch = llm.branch([1 + i % 1000 for i in range(1000)])
        children: list[Any] = []
        found = timed(lambda: children.append(branch.fork()), repetitions)
        branch.prune()
    return found


def measure_decode(num_branches: int, num_steps: int) -> dict[str, float]:
    """Milliseconds of a decode step of `num_branches` leaves in a tree of three levels."""
    width = max(1, round(num_branches**0.5))
    engine = null_engine(num_branches * (num_steps + 200) + 10_000, max_num_seqs=num_branches)
    root = engine.table.new_root([1 + i % 1000 for i in range(500)])
    leaves: list[TokenSequence] = []
    for middle in range(width):
        branch = engine.table.fork(root)
        engine.table.extend(branch, [1 + (middle + i) % 1000 for i in range(60)])
        for number in range(-(-num_branches // width)):
            if len(leaves) < num_branches:
                leaf = engine.table.fork(branch)
                engine.table.extend(leaf, [1 + (number + i) % 1000 for i in range(1, 2 + number)])
                leaves.append(leaf)
    for leaf in leaves:
        generate(engine, leaf, num_steps + 20)
    while len(engine.scheduler.running) < num_branches:
        engine.step()
    for _ in range(4):
        engine.step()
    gc.collect()  # what earlier measurements have left is not this one's cost
    found = []
    cpu = time.thread_time()
    for _ in range(num_steps):
        start = time.perf_counter()
        engine.step()
        found.append(time.perf_counter() - start)
    cpu = time.thread_time() - cpu
    assert len(engine.scheduler.running) == num_branches
    return {
        "branches": num_branches,
        "steps": num_steps,
        "cpu_ms": cpu / num_steps * 1e3,
        "mean_ms": statistics.fmean(found) * 1e3,
        "median_ms": statistics.median(found) * 1e3,
        "worst_ms": max(found) * 1e3,
    }


def tables(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    lines = [
        "The tree's own operations, median of 300, in µs:",
        "",
        "| context | other branches | fork | append | prune |",
        "| ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {row['context']:,} | {row['others']:,} | {row['fork_us']:.1f} "
        f"| {row['append_us']:.1f} | {row['prune_us']:.1f} |"
        for row in report["operations"]
    ]
    lines += [
        "",
        f"The call `b.fork()`, engine idle: {report['fork_call_us']:.1f} µs (median of 2,000).",
        "",
        "Schedule, plan and update of a decode step over a tree of three levels:",
        "",
        "| branches | steps | mean | median | worst | mean CPU time |",
        "| ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {row['branches']:.0f} | {row['steps']:.0f} | {row['mean_ms']:.2f} ms "
        f"| {row['median_ms']:.2f} ms | {row['worst_ms']:.2f} ms | {row['cpu_ms']:.2f} ms |"
        for row in report["decode"]
    ]
    return "\n".join(lines)
