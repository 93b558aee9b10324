"""Measures the native CPU kernels: the figures of docs/kernels.md.

    python scripts/cpu_kernel_figures.py [attention] [step] [prefill] [sampler] [limits]
                                         [--realtime]

Random weights and KV in the shapes of SmolLM2-135M and Qwen2.5-0.5B. Every figure is the median of
15 runs or more (in brackets the smallest). ``--realtime`` asks for the machine for the seconds that
are measured (Linux, root): without it other work on the same cores is measured too.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from cotrt.kernels.cpu import native
from cotrt.kernels.cpu.kv_cache import new_kv_cache
from cotrt.kernels.cpu.sample import sample
from cotrt.kernels.cpu.tree_attention import prepare_plan, tree_attention
from cotrt.models.config import ModelConfig
from cotrt.models.decoder_stack import CpuDecoder
from cotrt.models.rope import RotaryTable
from cotrt.models.weights import tensor_table
from cotrt.plan import AttentionPlan, StepPlan

BLOCK = 16
COMMON = {"tie_word_embeddings": True, "max_position_embeddings": 8192}
SHAPES: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": {
        **COMMON, "model_type": "llama", "vocab_size": 49152, "hidden_size": 576,
        "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
    "Qwen2.5-0.5B": {
        **COMMON, "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 896,
        "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
}  # fmt: skip
HEADS = {
    "SmolLM2 9/3/64": (9, 3, 64),
    "Qwen 0.5B 14/2/64": (14, 2, 64),
    "7B 28/4/128": (28, 4, 128),
}
realtime = "--realtime" in sys.argv


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """All threads of this process before everybody else's."""
    tids = [int(t) for t in os.listdir("/proc/self/task")] if realtime else []

    def schedule(policy: int, priority: int) -> None:
        for tid in tids:
            with contextlib.suppress(ProcessLookupError):
                os.sched_setscheduler(tid, policy, os.sched_param(priority))

    if tids:
        schedule(os.SCHED_RR, 10)
    try:
        yield
    finally:
        if tids:
            schedule(os.SCHED_OTHER, 0)


def timed(run: Callable[[], object], reps: int = 15) -> tuple[float, float]:
    """Median and smallest milliseconds."""
    times = []
    with undisturbed():
        for _ in range(3):
            run()
        for _ in range(reps):
            start = time.perf_counter()
            run()
            times.append((time.perf_counter() - start) * 1e3)
    return median(times), min(times)


def bandwidth() -> float:
    """GB/s of reading 512 MB with torch on all threads."""
    values = torch.ones(1 << 27)
    return values.nbytes / timed(values.sum)[1] / 1e6


def make_plan(positions: list[int], groups: list[tuple[Any, int, int, bool, list[int]]]) -> Any:
    """A plan from ``(name, start, length, causal, rows)``; equal names share blocks."""
    blocks: dict[Any, np.ndarray] = {}
    count = 0
    for name, _, length, _, _ in groups:
        if name not in blocks:
            size = -(-length // BLOCK)
            blocks[name] = np.arange(count, count + size, dtype=np.int32)
            count += size
    slots: list[list[int]] = [[] for _ in positions]
    for slot, row in enumerate(row for *_, rows in groups for row in rows):
        slots[row].append(slot)

    def offsets(runs: list[Any]) -> np.ndarray:
        return np.cumsum([0] + [len(run) for run in runs]).astype(np.int32)

    def flat(runs: list[Any]) -> np.ndarray:
        return np.concatenate([np.asarray(run) for run in runs]).astype(np.int32)

    runs, rows = [blocks[g[0]] for g in groups], [g[4] for g in groups]
    partials = [[-1] if len(slot) == 1 else slot for slot in slots]
    columns = [np.array([g[i] for g in groups], np.int32) for i in (1, 2, 3)]
    plan = AttentionPlan(
        BLOCK, np.array(positions, np.int32), flat(runs), offsets(runs), columns[0], columns[1],
        flat(rows), offsets(rows), columns[2], flat(partials), offsets(partials),
    )  # fmt: skip
    return plan, count


def branches(count: int, shared: int, private: int) -> tuple[AttentionPlan, int]:
    """One decode row a branch, the shared run read once."""
    tails = [(i, shared, private, True, [i]) for i in range(count)]
    root = [("root", 0, shared, False, list(range(count)))] if shared else []
    return make_plan([shared + private - 1] * count, [*root, *tails])


def apart(plan: AttentionPlan) -> AttentionPlan:
    """The same blocks read by every branch on its own."""
    root, *tails = (
        plan.group_blocks[slice(*plan.group_block_offsets[i : i + 2])]
        for i in range(plan.num_groups)
    )
    runs, count = [np.concatenate([root, tail]) for tail in tails], len(tails)
    each = np.arange(count + 1, dtype=np.int32)
    return replace(
        plan,
        group_blocks=np.concatenate(runs),
        group_block_offsets=np.cumsum([0] + [len(r) for r in runs]).astype(np.int32),
        group_start=np.zeros(count, np.int32),
        group_len=plan.query_positions + np.int32(1),
        group_rows=each[:-1],
        group_row_offsets=each,
        group_causal=np.ones(count, np.int32),
        row_partials=np.full(count, -1, np.int32),
        row_partial_offsets=each,
    )


def attention_us(plan: AttentionPlan, num_blocks: int, heads: tuple[int, int, int]) -> str:
    num_q_heads, num_kv_heads, dim = heads
    layers = 8
    caches = new_kv_cache(layers, num_blocks, BLOCK, num_kv_heads, dim, torch.bfloat16, "cpu")
    for k, v in caches:
        k.normal_()
        v.normal_()
    q = torch.randn(plan.num_rows, num_q_heads, dim).bfloat16()
    out, prepared = torch.empty_like(q), prepare_plan(plan)

    def run() -> None:
        for k, v in caches:
            tree_attention(q, k, v, prepared, scale=dim**-0.5, out=out)

    middle, least = timed(run)
    return f"{middle / layers * 1e3:.0f} ({least / layers * 1e3:.0f})"


def attention() -> None:
    print("\nus a layer call; 8 layers' buffers in turn")
    print("| heads | 32 x (1024 + 64) | 32 x (2000 + 64) | apart | B1 64 | B1 1024 | B8 512 |")
    for name, heads in HEADS.items():
        long = branches(32, 2000, 64)
        cells = [
            attention_us(*branches(32, 1024, 64), heads),
            attention_us(*long, heads),
            attention_us(apart(long[0]), long[1], heads),
            *(attention_us(*branches(b, 0, n), heads) for b, n in ((1, 64), (1, 1024), (8, 512))),
        ]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


class RandomWeights:
    """Random tensors of a config's shapes."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        outer, layers = tensor_table(config)
        specs = [*outer, *(spec for layer in layers for spec in layer.values())]
        self.shapes = {spec.name: spec.shape for spec in specs}
        self.values, self.dtype = 0.02 * torch.randn(1 << 22), dtype

    def get(self, name: str) -> torch.Tensor:
        count = int(np.prod(self.shapes[name]))
        values = self.values.repeat(-(-count // len(self.values)))[:count]
        return values.reshape(self.shapes[name]).to(self.dtype)


def model(shape: str, dtype: torch.dtype, quantization: str | None = None) -> CpuDecoder:
    config = ModelConfig.from_dict(SHAPES[shape])
    made = CpuDecoder(
        config, RandomWeights(config, dtype), tensor_table(config), RotaryTable(config.rope, "cpu"),
        dtype=dtype, quantization=quantization,
    )  # fmt: skip
    made.allocate_kv(1024, BLOCK)
    return made


def step_plan(plan: AttentionPlan, vocab_size: int, logits_rows: list[int]) -> StepPlan:
    slots = np.zeros(plan.num_rows, np.int64)
    for group in np.flatnonzero(plan.group_causal):
        blocks = plan.group_blocks[plan.group_block_offsets[group] :]
        for row in plan.group_rows[slice(*plan.group_row_offsets[group : group + 2])]:
            token = plan.query_positions[row] - plan.group_start[group]
            slots[row] = int(blocks[token // BLOCK]) * BLOCK + token % BLOCK
    ids = np.random.default_rng(0).integers(0, vocab_size, plan.num_rows).astype(np.int32)
    index = np.array(logits_rows, np.int32)
    return StepPlan(ids, plan.query_positions, slots, (), plan, index, np.arange(len(index)))


def step() -> None:
    for shape in SHAPES:
        for name in ("bfloat16", "int8", "float32"):
            if shape.startswith("Qwen") and name == "float32":
                continue
            dtype = torch.float32 if name == "float32" else torch.bfloat16
            made = model(shape, dtype, "int8" if name == "int8" else None)
            speed = bandwidth()
            print(f"\n{shape} {name}: {made.weight_bytes / 1e6:.0f} MB, read at {speed:.0f} GB/s")
            print("| branches x (shared + own) | ms | limit | ratio | phases, ms |")
            for count, shared in ((1, 0), (1, 1024), (8, 1024), (32, 0), (32, 1024), (64, 1024)):
                plan, _ = (
                    branches(count, 0, shared + 64) if count == 1 else branches(count, shared, 64)
                )
                one = step_plan(plan, made.vocab_size, list(range(count)))
                made.run(one)
                made.timings(reset=True)
                middle, least = timed(lambda made=made, one=one: made.run(one))
                phases = {k: v / 18 * 1e3 for k, v in made.timings().items()}
                shown = " ".join(f"{k} {v:.2f}" for k, v in phases.items() if v > 0.05)
                read = made.weight_bytes + (shared + 64 * count) * made.kv_bytes_per_token
                limit = read / speed / 1e6
                print(
                    f"| {count} x ({shared} + 64) | {middle:.2f} ({least:.2f}) | {limit:.2f} "
                    f"| {middle / limit:.2f} | {shown} |",
                    flush=True,
                )
            del made


def prefill() -> None:
    print("\n| prompt | ms | GFLOP/s of the linears | oneDNN, the same linears, ms |")
    for shape in SHAPES:
        made = model(shape, torch.bfloat16)
        config = made.config
        hidden, inner, layers = config.hidden_size, config.intermediate_size, config.num_layers
        q, kv = (n * config.head_dim for n in (config.num_q_heads, config.num_kv_heads))
        sizes = [(q + 2 * kv, hidden), (hidden, q), (2 * inner, hidden), (hidden, inner)]
        weights = [torch.randn(n, k).bfloat16() for n, k in sizes]
        for length in (512, 2000):
            plan, _ = make_plan(list(range(length)), [(0, 0, length, True, list(range(length)))])
            one = step_plan(plan, made.vocab_size, [length - 1])
            made.run(one)
            made.timings(reset=True)
            middle, least = timed(lambda made=made, one=one: made.run(one), 5)
            spent = sum(made.timings()[k] for k in ("qkv", "o", "gate_up", "down")) / 8
            products = 2 * length * sum(n * k for n, k in sizes) * (layers - 1)
            inputs = [torch.randn(length, k).bfloat16() for _, k in sizes]
            pairs = list(zip(inputs, weights, strict=True))
            one_layer = timed(lambda pairs=pairs: [F.linear(x, w) for x, w in pairs], 7)[0]
            print(
                f"| {shape} {length} | {middle:.0f} ({least:.0f}); linears {spent * 1e3:.0f} "
                f"| {products / spent / 1e9:.0f} | {one_layer * layers:.0f} |",
                flush=True,
            )
        del made


LIMITED = {  # branches, shared, private
    "8 private of 600": (8, 0, 600),
    "8 private of 1,100": (8, 0, 1100),
    "8 private of 4,000": (8, 0, 4000),
    "4 private of 4,000": (4, 0, 4000),
    "1 of 6,000": (1, 0, 6000),
    "1 of 1,088": (1, 0, 1088),
    "32 over 1,024 shared": (32, 1024, 64),
    "64 private of 128": (64, 0, 128),
}


def limits(rounds: int = 40) -> None:
    """Smallest native call of each step, and what memory takes for its bytes.

    The read rate is the best of those measured between the calls, over 1 GiB: more than any cache.
    """
    made = model("SmolLM2-135M", torch.bfloat16)
    made.allocate_kv(2100, BLOCK)
    big = torch.ones(1 << 28)
    print("\n| step | ms, smallest | limit | ratio | GB/s of memory | phases of the smallest, ms |")
    for name, (count, shared, private) in LIMITED.items():
        one = step_plan(branches(count, shared, private)[0], made.vocab_size, list(range(count)))
        read = made.weight_bytes + (shared + private * count) * made.kv_bytes_per_token
        times: list[tuple[float, dict[str, float]]] = []
        rates = []
        made.run(one)
        for turn in range(rounds):
            made.timings(reset=True)
            with undisturbed():
                start = time.perf_counter()
                made.run(one)
                times.append((time.perf_counter() - start, made.timings()))
                if turn % 4 == 0:
                    start = time.perf_counter()
                    big.sum()
                    rates.append(big.nbytes / (time.perf_counter() - start) / 1e9)
        (least, phases), limit = min(times, key=lambda one: one[0]), read / max(rates) / 1e6
        shown = " ".join(f"{k} {v * 1e3:.2f}" for k, v in phases.items() if v > 5e-5)
        print(
            f"| {name} | {least * 1e3:.2f} | {limit:.2f} | {least * 1e3 / limit:.2f} "
            f"| {max(rates):.1f} | {shown} |",
            flush=True,
        )


def sampler() -> None:
    print("\nms for 32 draws | plain | top-p 0.95 | top-k 50 | greedy |")
    for vocab in (49_152, 151_936):
        logits = 3 * torch.randn(32, vocab)
        rows, keys = np.arange(32, dtype=np.int32), np.arange(32, dtype=np.uint32)
        cells = []
        for temperature, k, p in ((0.8, 0, 1.0), (0.8, 0, 0.95), (0.8, 50, 1.0), (0.0, 0, 1.0)):
            values = (
                np.full(32, temperature, np.float32),
                np.full(32, k, np.int32),
                np.full(32, p, np.float32),
                np.zeros(32, np.float32),
            )
            run = lambda values=values: sample(logits, rows, *values, keys, keys)  # noqa: E731, B023
            middle, least = timed(run)
            cells.append(f"{middle:.2f} ({least:.2f})")
        print(f"| {vocab} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    threads = native.set_num_threads(None)
    torch.set_num_threads(threads)
    print(f"{native.isa()}, {threads} threads, {bandwidth():.0f} GB/s")
    parts = {
        "attention": attention, "step": step, "prefill": prefill, "sampler": sampler,
        "limits": limits,
    }  # fmt: skip
    wanted = [name for name in parts if name in sys.argv] or list(parts)
    for name in wanted:
        parts[name]()
