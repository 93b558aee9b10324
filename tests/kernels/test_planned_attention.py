"""The planner's plans, run by reference attention, against each row's own path, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from cotrt.kernels.reference.tree_attention import prepare_plan, tree_attention
from cotrt.plan import AttentionPlan
from cotrt.tree.attention.planner import AttentionPlanner, PlanCosts, PlanLeaf

BLOCK_SIZE = 8
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8

COSTS = {
    "always_share": PlanCosts(kv_bytes_per_token=1000, partial_bytes_per_row=0),
    "never_share": PlanCosts(kv_bytes_per_token=1, partial_bytes_per_row=10**6),
    "by_bytes": PlanCosts.for_heads(HEADS, KV_HEADS, HEAD_DIM, 4),
    "split": PlanCosts(kv_bytes_per_token=64, partial_bytes_per_row=64, max_group_tokens=24),
}


@dataclass(eq=False)
class Node:
    parent: Node | None
    blocks: list[int] = field(default_factory=list)

    @property
    def start(self) -> int:
        return 0 if self.parent is None else self.parent.end

    @property
    def end(self) -> int:
        return self.start + len(self.blocks) * BLOCK_SIZE

    def path(self) -> list[int]:
        return [*(self.parent.path() if self.parent else []), *self.blocks]


def random_leaves(rng: np.random.Generator, decode: bool) -> tuple[list[PlanLeaf], list[int]]:
    """Leaves over a random tree, and the block ids still free."""
    free = rng.permutation(400).tolist()
    nodes = [Node(None, [free.pop() for _ in range(rng.integers(0, 5))])]
    for _ in range(rng.integers(1, 8)):
        parent = nodes[rng.integers(len(nodes))]
        nodes.append(Node(parent, [free.pop() for _ in range(rng.integers(1, 5))]))
    leaves = []
    for _ in range(rng.integers(1, 10)):
        node = nodes[rng.integers(len(nodes))]
        own = int(rng.integers(1, 25))
        blocks = [free.pop() for _ in range(-(-own // BLOCK_SIZE))]
        rows = 1 if decode else int(rng.integers(1, own + 1))
        leaves.append(PlanLeaf(node, blocks, node.end + own, rows))
    return leaves, free


def expected_rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, leaves: Sequence[PlanLeaf]
) -> torch.Tensor:
    """float64 attention of each row over its own path; no plan is looked at."""
    rows = []
    for leaf in leaves:
        blocks = torch.tensor([*leaf.node.path(), *leaf.private_blocks])
        keys, values = (c[blocks].transpose(1, 2).flatten(0, 1).double() for c in (k, v))
        for row in range(leaf.num_rows):
            seen = leaf.context_len - leaf.num_rows + row + 1
            query = q[len(rows)].double().view(KV_HEADS, -1, HEAD_DIM)
            scores = torch.einsum("hgd,nhd->hgn", query, keys[:seen]) * 0.7
            rows.append(
                torch.einsum("hgn,nhd->hgd", scores.softmax(-1), values[:seen]).flatten(0, 1)
            )
    return torch.stack(rows)


def filled(leaves: Sequence[PlanLeaf], seed: int) -> tuple[torch.Tensor, ...]:
    """q, and caches that hold NaN wherever no leaf has a token."""
    generator = torch.Generator().manual_seed(seed)
    num_rows = sum(leaf.num_rows for leaf in leaves)
    q = torch.randn(num_rows, HEADS, HEAD_DIM, generator=generator)
    caches = []
    for _ in range(2):
        cache = torch.full((400, KV_HEADS, BLOCK_SIZE, HEAD_DIM), torch.nan)
        for leaf in leaves:
            for at, block in enumerate([*leaf.node.path(), *leaf.private_blocks]):
                used = min(BLOCK_SIZE, leaf.context_len - at * BLOCK_SIZE)
                if used > 0:
                    row = torch.randn(KV_HEADS, used, HEAD_DIM, generator=generator)
                    cache[block, :, :used] = row
        caches.append(cache)
    return q, *caches


def check(plan: AttentionPlan, leaves: Sequence[PlanLeaf], seed: int) -> None:
    q, k, v = filled(leaves, seed)
    out = tree_attention(q, k, v, prepare_plan(plan, "cpu"), scale=0.7)
    assert (out.double() - expected_rows(q, k, v, leaves)).abs().max() < 3e-6


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("seed", range(12))
def test_any_tree(costs: str, seed: int) -> None:
    leaves, _ = random_leaves(np.random.default_rng(seed), decode=False)
    check(AttentionPlanner(BLOCK_SIZE, COSTS[costs]).plan(leaves), leaves, seed)


@pytest.mark.parametrize("costs", COSTS)
def test_plans_that_advance(costs: str) -> None:
    leaves, free = random_leaves(np.random.default_rng(5), decode=True)
    planner = AttentionPlanner(BLOCK_SIZE, COSTS[costs], spare_blocks=2)
    planner.plan(leaves)
    for step in range(BLOCK_SIZE + 2):
        grown = []
        new_blocks = []
        for i, leaf in enumerate(leaves):
            blocks = list(leaf.private_blocks)
            if leaf.node.end + len(blocks) * BLOCK_SIZE == leaf.context_len:
                blocks.append(free.pop())
                new_blocks.append((i, blocks[-1]))
            grown.append(PlanLeaf(leaf.node, blocks, leaf.context_len + 1, 1))
        leaves = grown
        plan = planner.advance(new_blocks)
        if plan is None:
            plan = planner.plan(leaves)
        check(plan, leaves, step)
