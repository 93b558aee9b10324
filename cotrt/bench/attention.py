"""`python -m cotrt.bench attention`: what reading shared keys once gains, and what it costs.

Two comparisons on the native kernels, each in interleaved pairs, each with a bootstrap interval of
the median ratio:

    shared    branches over one prefix: per query over grouped (how much faster grouping is)
    apart     a batch that shares nothing: the planner over one that never groups (what it costs)

A step is the planning (afresh once in 16 steps, the last plan lengthened in the others) and the
attention of some layers.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cotrt.kernels.dispatch import plan_options
from cotrt.plan import AttentionPlan
from cotrt.tree.attention.planner import AttentionPlanner, PlanCosts, PlanLeaf

BLOCK = 16
_PLAN_EVERY = 16


@dataclass(frozen=True)
class _Node:
    parent: _Node | None
    blocks: Sequence[int]
    start: int


@dataclass(frozen=True)
class Shape:
    """Heads and lengths of a comparison."""

    heads: tuple[int, int, int] = (9, 3, 64)  # query heads, KV heads, head dim
    branches: int = 32
    shared: int = 2000
    own: int = 64
    layers: int = 8


def main(argv: Sequence[str]) -> int:
    """Print both comparisons."""
    parser = argparse.ArgumentParser(
        prog="python -m cotrt.bench attention", description="Grouped attention against plain."
    )
    parser.add_argument("--heads", default="9,3,64", help="query heads, KV heads, head dim")
    parser.add_argument("--branches", type=int, default=32)
    parser.add_argument("--shared", type=int, default=2000, help="tokens of the prefix")
    parser.add_argument("--own", type=int, default=64, help="tokens of each branch")
    parser.add_argument(
        "--context", type=int, default=512, help="tokens each where nothing is shared"
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args(argv)
    from cotrt.kernels.cpu import native

    native.set_num_threads(options.threads)
    heads = tuple(int(text) for text in options.heads.split(","))
    assert len(heads) == 3, "--heads takes three numbers"
    shape = Shape(heads, options.branches, options.shared, options.own, options.layers)
    rows = {
        "shared: per query over grouped": compare(shape, options.pairs, plain_first=True),
        "apart: planner over never grouping": compare(
            Shape(heads, options.branches, 0, options.context, options.layers), options.pairs
        ),
    }
    for name, row in rows.items():
        print(
            f"{name}: {row['ratio']:.3f} (95% {row['low']:.3f} to {row['high']:.3f}, "
            f"{row['pairs']} pairs; {row['ms'][0]:.2f} and {row['ms'][1]:.2f} ms a step)"
        )
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")
    return 0


def compare(shape: Shape, pairs: int, *, plain_first: bool = False) -> dict[str, Any]:
    """Time the planner's plan beside that of a planner that never groups.

    Returns:
        ``ratio`` of the medians of pairs with its 95% interval ``low`` to ``high``, ``pairs``, and
        the median ``ms`` of each side. The ratio is the planner's time over the plain one's, or
        the other way round with ``plain_first``.
    """
    leaves, num_blocks = _leaves(shape, pairs + _PLAN_EVERY)
    costs = PlanCosts(**plan_options("cpu", *shape.heads, 2))
    run = _attention(shape, num_blocks)
    plain = [PlanLeaf(_Node(None, (), 0), _all(x), x.context_len, x.num_rows) for x in leaves]
    sides = [_steps(AttentionPlanner(BLOCK, costs), each, run) for each in (leaves, plain)]
    if plain_first:
        sides.reverse()
    seconds = np.empty((pairs, 2))
    for step in range(-2, pairs):
        order = (0, 1) if step % 2 else (1, 0)  # neither is always the first
        for side in order:
            start = time.perf_counter()
            sides[side](step + 2)
            if step >= 0:
                seconds[step, side] = time.perf_counter() - start
    ratios = seconds[:, 0] / seconds[:, 1]
    low, high = bootstrap_interval(ratios)
    return {
        "ratio": float(np.median(ratios)),
        "low": low,
        "high": high,
        "pairs": pairs,
        "ms": [float(x) * 1e3 for x in np.median(seconds, axis=0)],
    }


def bootstrap_interval(values: np.ndarray[Any, Any], resamples: int = 4000) -> tuple[float, float]:
    """The 95% percentile interval of the median of ``values``; the same for the same values."""
    source = np.random.default_rng(0)
    drawn = source.integers(0, len(values), (resamples, len(values)))
    low, high = np.percentile(np.median(values[drawn], axis=1), (2.5, 97.5))
    return float(low), float(high)


def _leaves(shape: Shape, steps: int) -> tuple[list[PlanLeaf], int]:
    """Decode rows at their first step; private blocks for all steps to come."""
    prefix = shape.shared // BLOCK
    node = _Node(_Node(None, (), 0), range(prefix), 0)
    tail = shape.shared % BLOCK + shape.own  # a prefix that ends within a block is copied
    size = -(-(tail + steps) // BLOCK)
    leaves = [
        PlanLeaf(
            node,
            range(prefix + i * size, prefix + (i + 1) * size),
            shape.shared + shape.own,
            1,
        )
        for i in range(shape.branches)
    ]
    return leaves, prefix + shape.branches * size


def _all(leaf: PlanLeaf) -> list[int]:
    return [*leaf.node.blocks, *leaf.private_blocks]


def _steps(
    planner: AttentionPlanner, leaves: Sequence[PlanLeaf], run: Callable[[AttentionPlan], None]
) -> Callable[[int], None]:
    """One step: every leaf has grown by a token since the last."""

    def step(index: int) -> None:
        plan = None
        if index % _PLAN_EVERY:
            held = leaves[0].context_len + index - 1
            begins = held % BLOCK == 0
            # Entries of blocks to come are among the private ones already.
            plan = planner.advance([]) if not begins else None
        if plan is None:
            grown = [
                PlanLeaf(x.node, x.private_blocks, x.context_len + index, x.num_rows)
                for x in leaves
            ]
            plan = planner.plan(grown)
        run(plan)

    return step


def _attention(shape: Shape, num_blocks: int) -> Callable[[AttentionPlan], None]:
    import torch

    from cotrt.kernels.cpu.kv_cache import new_kv_cache
    from cotrt.kernels.cpu.tree_attention import prepare_plan, tree_attention

    num_q_heads, num_kv_heads, dim = shape.heads
    caches = new_kv_cache(shape.layers, num_blocks, BLOCK, num_kv_heads, dim, torch.bfloat16, "cpu")
    for k, v in caches:
        k.normal_()
        v.normal_()
    q = torch.randn(shape.branches, num_q_heads, dim).bfloat16()
    out = torch.empty_like(q)

    def run(plan: AttentionPlan) -> None:
        prepared = prepare_plan(plan)
        for k, v in caches:
            tree_attention(q, k, v, prepared, scale=dim**-0.5, out=out)

    return run
