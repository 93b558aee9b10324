"""Sequences of one tree and every deterministic plan for their rows, for the backends' tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import torch

from cotrt.plan import AttentionPlan


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@dataclasses.dataclass
class Case:
    """Sequences of one tree: each a block table, where its rows begin, and its length."""

    chunk: int
    block_size: int
    q: torch.Tensor
    k: torch.Tensor  # the reference's layout
    v: torch.Tensor
    tables: list[list[int]]
    first_rows: list[int]  # position of each sequence's first row
    lengths: list[int]
    shared: int  # tokens that all have in common

    @property
    def positions(self) -> list[int]:
        return [p for f, n in zip(self.first_rows, self.lengths) for p in range(f, n)]


def make_case(
    seed: int,
    dtype: torch.dtype,
    block_size: int,
    heads: int,
    kv_heads: int,
    *,
    head_dim: int = 16,
    chunk: int = 256,
    max_sequences: int = 6,
    max_rows: int = 70,
) -> Case:
    """The same numbers for every block size, in other blocks."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    count, shared = int(rng.integers(1, max_sequences + 1)), chunk * int(rng.integers(0, 4))
    own = [int(n) for n in rng.integers(1, chunk * 600 // 256, count)]
    rows = [min(int(rng.choice([1, 1, 2, 30, 70])), max_rows) for _ in own]
    lengths = [shared + n for n in own]
    first_rows = [length - min(r, n) for length, r, n in zip(lengths, rows, own)]
    stem = torch.randn(2, shared, kv_heads, head_dim, generator=generator)
    tails = [torch.randn(2, n, kv_heads, head_dim, generator=generator) for n in own]
    blocks = [-(-n // block_size) for n in own]
    pool = shared // block_size + sum(blocks)
    ids = np.random.default_rng(seed + block_size).permutation(pool).tolist()
    caches = torch.randn(2, pool, block_size, kv_heads, head_dim, generator=generator)
    stem_ids = [ids.pop() for _ in range(shared // block_size)]
    tables = []
    for tail, n in zip(tails, blocks):
        mine = [*stem_ids, *(ids.pop() for _ in range(n))]
        for position, row in enumerate(torch.cat((stem, tail), 1).unbind(1)):
            caches[:, mine[position // block_size], position % block_size] = row
        tables.append(mine)
    total = sum(n - f for f, n in zip(first_rows, lengths))
    # Drawn last, so that it does not hang on the pool's size.
    q = torch.randn(total, heads, head_dim, generator=torch.Generator().manual_seed(seed + 1))
    k, v = caches.transpose(2, 3).contiguous().to(dtype)
    return Case(chunk, block_size, q.to(dtype), k, v, tables, first_rows, lengths, shared)


def plan_of(case: Case, split_at: list[int]) -> AttentionPlan:
    """All in one plan. Of sequence i the first ``split_at[i]`` chunks (at least the shared ones,
    where any) are one group, its other chunks one each; those who begin with the same shared
    chunks read them together."""
    groups: list[tuple[int, int, list[int], list[int]]] = []  # start, len, blocks, rows
    first_row = np.cumsum([0, *(n - f for f, n in zip(case.first_rows, case.lengths))])
    size, chunk, stem = case.block_size, case.chunk, case.shared // case.chunk
    together = [i for i, s in enumerate(split_at) if s == stem and stem]
    rows_of = [list(range(first_row[i], first_row[i + 1])) for i in range(len(split_at))]
    if together:
        rows = [r for i in together for r in rows_of[i]]
        groups.append((0, case.shared, case.tables[together[0]][: case.shared // size], rows))
    for i, (table, split) in enumerate(zip(case.tables, split_at)):
        length = case.lengths[i]
        if i not in together:
            end = min(length, max(split, 1) * chunk)
            groups.append((0, end, table[: -(-end // size)], rows_of[i]))
        for start in range(max(split, 1) * chunk, length, chunk):
            end = min(length, start + chunk)
            seen = [r for r in rows_of[i] if case.positions[r] >= start]
            groups.append((start, end - start, table[start // size : -(-end // size)], seen))
    rows = [r for *_, group in groups for r in group]
    slots: list[list[int]] = [[] for _ in case.positions]
    for slot, row in enumerate(rows):
        slots[row].append(slot)
    partials = [[-1] if len(s) == 1 else s for s in slots]

    def array(values: list[int]) -> np.ndarray:
        return np.array(values, np.int32)

    def offsets(parts: list[list[int]]) -> np.ndarray:
        return array([0, *np.cumsum([len(p) for p in parts]).tolist()])

    return AttentionPlan(
        block_size=size,
        query_positions=array(case.positions),
        group_blocks=array([b for _, _, blocks, _ in groups for b in blocks]),
        group_block_offsets=offsets([blocks for _, _, blocks, _ in groups]),
        group_start=array([start for start, *_ in groups]),
        group_len=array([length for _, length, *_ in groups]),
        group_rows=array(rows),
        group_row_offsets=offsets([rows for *_, rows in groups]),
        group_causal=array([1] * len(groups)),
        row_partials=array([s for part in partials for s in part]),
        row_partial_offsets=offsets(partials),
        chunk_tokens=chunk,
    )


def one_by_one(
    case: Case, attend: Callable[[Case, AttentionPlan], torch.Tensor], every: int = 1
) -> torch.Tensor:
    """Every row (or each ``every``-th) by itself, all of its chunks in one group."""
    out, row = [], 0
    for i in range(len(case.tables)):
        for position in range(case.first_rows[i], case.lengths[i]):
            alone = dataclasses.replace(
                case,
                q=case.q[row : row + 1],
                tables=[case.tables[i]],
                first_rows=[position],
                lengths=[position + 1],
                shared=0,
            )
            if row % every == 0:
                out.append(attend(alone, plan_of(alone, [99])))
            row += 1
    return torch.cat(out)


def exact(case: Case, scale: float) -> torch.Tensor:
    """The oracle's answer, float64."""
    from attention_oracle import oracle

    plan = dataclasses.replace(plan_of(case, [99] * len(case.tables)), chunk_tokens=0)
    return oracle(case.q, case.k, case.v, plan, scale).to(torch.float64)
