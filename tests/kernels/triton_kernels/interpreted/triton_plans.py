"""Random trees, their plans and their pools, for the attention kernel's tests."""

from __future__ import annotations

import numpy as np
import torch
from attention_trees import Tree

from cotrt.kernels.reference.tree_attention import tree_attention as reference
from cotrt.kernels.triton.tree_attention import tree_attention
from cotrt.plan import AttentionPlan
from cotrt.tree.attention.planner import AttentionPlanner, PlanCosts

# All sums are float32. What differs is the order of sums, and for 16 bits the rounding of the
# softmax weights before they meet V (2^-9 and 2^-12 relative) and of the output.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


def plan_of(tree: Tree, *, share: bool = True, max_group_tokens: int | None = None):
    """A plan that shares all it can (or nothing)."""
    costs = PlanCosts(64, 1, 0, 0 if share else 1 << 40, max_group_tokens)
    return AttentionPlanner(tree.block_size, costs).plan(tree.leaves)


def random_tree(
    rng: np.random.Generator, depth: int, width: int, block_size: int, *, prefill: bool = False
) -> Tree:
    """``depth`` levels of nodes under one root, ``width`` leaves at any of them, ragged."""
    tree = Tree(block_size)
    levels = [[tree.node(None, int(rng.integers(1, 4)))]]
    for _ in range(depth - 1):
        num_nodes = int(rng.integers(1, min(4, width) + 1))
        above = levels[-1]
        made = [
            tree.node(above[int(rng.integers(len(above)))], int(rng.integers(1, 3)))
            for _ in range(num_nodes)
        ]
        levels.append(made)
    nodes = [node for level in levels for node in level]
    for index in range(width):
        node = nodes[-1] if index == 0 else nodes[int(rng.integers(len(nodes)))]
        tokens = int(rng.choice([1, 1, block_size - 1, block_size, block_size + 1, 2 * block_size]))
        rows = 1
        if prefill and rng.random() < 0.5:
            rows = int(rng.integers(1, tokens + 2))
        tree.leaf(node, tokens, rows)
    return tree


def pool_for(
    plan: AttentionPlan,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V: random in the slots that the plan reads, NaN in all others."""
    block_size = plan.block_size
    spread = np.diff(plan.group_block_offsets)
    index = np.arange(len(plan.group_blocks)) - np.repeat(plan.group_block_offsets[:-1], spread)
    filled = np.clip(np.repeat(plan.group_len, spread) - index * block_size, 0, block_size)
    used = np.zeros(int(plan.group_blocks.max(initial=0)) + 2, np.int64)
    np.maximum.at(used, plan.group_blocks, filled)
    valid = torch.from_numpy(np.arange(block_size) < used[:, None])[:, None, :, None]
    generator = torch.Generator().manual_seed(seed)
    shape = (len(used), num_kv_heads, block_size, head_dim)
    k, v = (
        torch.where(valid, torch.randn(shape, generator=generator), torch.nan).to(dtype)
        for _ in range(2)
    )
    return k.to(device), v.to(device)


def queries(
    num_rows: int, num_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_rows)
    return torch.randn(num_rows, num_heads, head_dim, generator=generator).to(dtype).to(device)


def check(
    plan,
    num_kv_heads: int,
    heads_per_kv: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    prepared=None,
) -> torch.Tensor:
    """The kernel against the reference on random inputs, into an output full of NaN."""
    k, v = pool_for(plan, num_kv_heads, head_dim, dtype, device)
    q = queries(plan.num_rows, num_kv_heads * heads_per_kv, head_dim, dtype, device)
    out = torch.full_like(q, torch.nan)
    scale = head_dim**-0.5
    given = tree_attention(q, k, v, plan if prepared is None else prepared, scale=scale, out=out)
    assert given is out
    expected = reference(q.cpu(), k.cpu(), v.cpu(), plan, scale=scale)
    torch.testing.assert_close(out.cpu().float(), expected.float(), rtol=0.0, atol=TOLERANCE[dtype])
    return out
