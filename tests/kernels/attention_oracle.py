"""A brute-force float64 oracle, built from what a plan means, and a maker of random plans."""

from __future__ import annotations

import numpy as np
import torch

from cotrt.plan import AttentionPlan


def oracle(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, plan: AttentionPlan, scale: float
) -> torch.Tensor:
    """Each row's softmax over all the tokens that it sees, one at a time, in float64."""
    num_rows, num_q_heads, head_dim = q.shape
    heads = num_q_heads // k_cache.shape[1]
    out = torch.zeros(num_rows, num_q_heads, head_dim, dtype=torch.float64)
    for row in range(num_rows):
        slots = []
        for group in range(plan.num_groups):
            rows = plan.group_rows[slice(*plan.group_row_offsets[group : group + 2])]
            blocks = plan.group_blocks[slice(*plan.group_block_offsets[group : group + 2])]
            if row not in rows:
                continue
            for token in range(plan.group_len[group]):
                position = plan.group_start[group] + token
                if not plan.group_causal[group] or position <= plan.query_positions[row]:
                    slots.append((blocks[token // plan.block_size], token % plan.block_size))
        block = torch.tensor([slot[0] for slot in slots])
        offset = torch.tensor([slot[1] for slot in slots])
        keys, values = (c[block, :, offset].double() for c in (k_cache, v_cache))  # [n, Hkv, D]
        for head in range(num_q_heads):
            scores = keys[:, head // heads] @ q[row, head].double() * scale
            out[row, head] = torch.softmax(scores, 0) @ values[:, head // heads]
    return out


def build_plan(
    block_size: int,
    query_positions: list[int],
    groups: list[tuple[int, int, bool, list[int]]],
    order: np.random.Generator | None = None,
    spare: int = 0,
) -> tuple[AttentionPlan, int]:
    """A plan from ``(start, length, causal, rows)`` groups, root to leaf for every row.

    Block ids are drawn without repetition from a pool of twice the size. ``spare`` block entries
    of nonsense follow each run.

    Returns:
        The plan, and the size of the pool.
    """
    sizes = [-(-length // block_size) for _, length, _, _ in groups]
    pool = 2 * sum(sizes) + 1
    ids = (order or np.random.default_rng(0)).permutation(pool).tolist()
    runs = [[ids.pop() for _ in range(size)] + [1 << 30] * spare for size in sizes]
    slots: list[list[int]] = [[] for _ in query_positions]
    count = 0
    for _, _, _, rows in groups:
        for row in rows:
            slots[row].append(count)
            count += 1
    partials = [[-1] if len(slot) == 1 else slot for slot in slots]

    def flat(lists: list[list[int]]) -> np.ndarray:
        return np.array([item for one in lists for item in one], np.int32)

    def offsets(lists: list[list[int]]) -> np.ndarray:
        return np.cumsum([0] + [len(one) for one in lists]).astype(np.int32)

    rows = [rows for *_, rows in groups]
    plan = AttentionPlan(
        block_size=block_size,
        query_positions=np.array(query_positions, np.int32),
        group_blocks=flat(runs),
        group_block_offsets=offsets(runs),
        group_start=np.array([g[0] for g in groups], np.int32),
        group_len=np.array([g[1] for g in groups], np.int32),
        group_rows=flat(rows),
        group_row_offsets=offsets(rows),
        group_causal=np.array([g[2] for g in groups], np.int32),
        row_partials=flat(partials),
        row_partial_offsets=offsets(partials),
    )
    return plan, pool


def fill_caches(
    plan: AttentionPlan,
    pool: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V with random values in the plan's own slots and NaN everywhere else."""
    shape = (pool, num_kv_heads, plan.block_size, head_dim)
    k = torch.full(shape, torch.nan, dtype=dtype)
    v = torch.full(shape, torch.nan, dtype=dtype)
    for group in range(plan.num_groups):
        blocks = plan.group_blocks[slice(*plan.group_block_offsets[group : group + 2])]
        for token in range(plan.group_len[group]):
            block, offset = int(blocks[token // plan.block_size]), token % plan.block_size
            for cache in (k, v):
                row = torch.randn(num_kv_heads, head_dim, generator=generator)
                cache[block, :, offset] = row.to(dtype)
    return k, v
