"""Fixed order and fixed chunks: a row's bits are its own, whatever is computed beside it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from attention_oracle import oracle
from hypothesis import given, settings
from hypothesis import strategies as st
from native_caches import native_caches

from cotrt.kernels.cpu.linear import PackedWeight
from cotrt.kernels.cpu.tree_attention import prepare_plan, tree_attention
from cotrt.plan import AttentionPlan

KINDS = [torch.float32, torch.bfloat16, torch.int8]
CHUNK = 256


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def weight(n: int, k: int, kind: torch.dtype, **options: bool) -> tuple[PackedWeight, torch.Tensor]:
    generator = torch.Generator().manual_seed(n + k)
    sources = [torch.randn(n, k, generator=generator)]
    if options.get("interleave"):
        sources = list(sources[0].split(n // 2))
    bias = [torch.randn(len(s), generator=generator) for s in sources]
    packed = PackedWeight(sources, dtype=kind, biases=bias, fixed_order=True, **options)
    return packed, torch.randn(450, k, generator=generator).to(packed.activation_dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), [(96, 576), (50, 34), (33, 1538)])
def test_a_linear_gives_a_row_the_same_bits_in_any_batch(kind: torch.dtype, n: int, k: int) -> None:
    packed, x = weight(n, k, kind)
    alone = torch.cat([packed(x[i : i + 1], torch.float32) for i in range(len(x))])
    for m in [*range(2, 34), 47, 48, 49, 96, 100, 200, 450]:
        assert same_bits(packed(x[:m], torch.float32), alone[:m]), m
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    for m in (2, 7, 12, 13, 33, 450):
        assert same_bits(packed(x[order[:m]], torch.float32), alone[order[:m]]), m


@pytest.mark.parametrize("kind", KINDS)
def test_epilogues_too(kind: torch.dtype) -> None:
    packed, x = weight(64, 96, kind, interleave=True)
    alone = torch.cat([packed.silu_mul(x[i : i + 1]) for i in range(40)])
    plain, _ = weight(64, 96, kind)
    sums = torch.ones(40, 64)
    for i in range(40):
        plain.add_to(x[i : i + 1], sums[i : i + 1])
    for m in range(2, 41):
        assert same_bits(packed.silu_mul(x[:m]), alone[:m])
        residual = torch.ones(m, 64)
        plain.add_to(x[:m], residual)
        assert same_bits(residual, sums[:m])


@dataclasses.dataclass
class Case:
    """Sequences of one tree: each a block table, where its rows begin, and its length."""

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


def make_case(seed: int, dtype: torch.dtype, block_size: int, heads: int, kv_heads: int) -> Case:
    """The same numbers for every block size, in other blocks."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    count, shared = int(rng.integers(1, 7)), 256 * int(rng.integers(0, 4))
    own = [int(n) for n in rng.integers(1, 600, count)]
    rows = [int(rng.choice([1, 1, 2, 30, 70])) for _ in own]
    lengths = [shared + n for n in own]
    first_rows = [length - min(r, n) for length, r, n in zip(lengths, rows, own)]
    stem = torch.randn(2, shared, kv_heads, 16, generator=generator)
    tails = [torch.randn(2, n, kv_heads, 16, generator=generator) for n in own]
    blocks = [-(-n // block_size) for n in own]
    pool = shared // block_size + sum(blocks)
    ids = np.random.default_rng(seed + block_size).permutation(pool).tolist()
    caches = torch.randn(2, pool, block_size, kv_heads, 16, generator=generator)
    stem_ids = [ids.pop() for _ in range(shared // block_size)]
    tables = []
    for tail, n in zip(tails, blocks):
        mine = [*stem_ids, *(ids.pop() for _ in range(n))]
        for position, row in enumerate(torch.cat((stem, tail), 1).unbind(1)):
            caches[:, mine[position // block_size], position % block_size] = row
        tables.append(mine)
    total = sum(n - f for f, n in zip(first_rows, lengths))
    # Drawn last, so that it does not hang on the pool's size.
    q = torch.randn(total, heads, 16, generator=torch.Generator().manual_seed(seed + 1))
    k, v = caches.transpose(2, 3).contiguous().to(dtype)
    return Case(block_size, q.to(dtype), k, v, tables, first_rows, lengths, shared)


def plan_of(case: Case, split_at: list[int]) -> AttentionPlan:
    """All in one plan. Of sequence i the first ``split_at[i]`` chunks (at least the shared ones,
    where any) are one group, its other chunks one each; those who begin with the same shared
    chunks read them together."""
    groups: list[tuple[int, int, list[int], list[int]]] = []  # start, len, blocks, rows
    first_row = np.cumsum([0, *(n - f for f, n in zip(case.first_rows, case.lengths))])
    size, stem = case.block_size, case.shared // CHUNK
    together = [i for i, s in enumerate(split_at) if s == stem and stem]
    rows_of = [list(range(first_row[i], first_row[i + 1])) for i in range(len(split_at))]
    if together:
        rows = [r for i in together for r in rows_of[i]]
        groups.append((0, case.shared, case.tables[together[0]][: case.shared // size], rows))
    for i, (table, split) in enumerate(zip(case.tables, split_at)):
        length = case.lengths[i]
        if i not in together:
            end = min(length, max(split, 1) * CHUNK)
            groups.append((0, end, table[: -(-end // size)], rows_of[i]))
        for start in range(max(split, 1) * CHUNK, length, CHUNK):
            end = min(length, start + CHUNK)
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
        chunk_tokens=CHUNK,
    )


def attend(case: Case, plan: AttentionPlan) -> torch.Tensor:
    k, v = native_caches(case.k, case.v)
    return tree_attention(case.q, k, v, prepare_plan(plan), scale=0.25)


def one_by_one(case: Case) -> torch.Tensor:
    """Every row by itself, in a step of its own, all of its chunks in one group."""
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
            out.append(attend(alone, plan_of(alone, [99])))
            row += 1
    return torch.cat(out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 1), (4, 2), (9, 3), (14, 2)])
@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 10**6), splits=st.randoms(use_true_random=False))
def test_attention_gives_a_row_the_same_bits_in_any_plan(
    dtype: torch.dtype, heads: int, kv_heads: int, seed: int, splits: object
) -> None:
    case = make_case(seed, dtype, 16, heads, kv_heads)
    expected = one_by_one(case)
    assert (expected - oracle_of(case)).abs().max() < (3e-6 if dtype == torch.float32 else 2e-2)
    stem = case.shared // CHUNK
    several = [
        [stem] * len(case.tables),
        [0] * len(case.tables),
        [splits.choice([0, stem, 1, 2, 99]) for _ in case.tables],  # type: ignore[attr-defined]
    ]
    for split_at in several:
        assert same_bits(attend(case, plan_of(case, split_at)), expected), split_at
    for block_size in (8, 32, 256):
        other = make_case(seed, dtype, block_size, heads, kv_heads)
        assert same_bits(attend(other, plan_of(other, several[2])), expected), block_size


def oracle_of(case: Case) -> torch.Tensor:
    plan = dataclasses.replace(plan_of(case, [99] * len(case.tables)), chunk_tokens=0)
    return oracle(case.q, case.k, case.v, plan, 0.25).to(torch.float64)


def test_plans_that_are_not_made_of_chunks_are_refused() -> None:
    case = make_case(0, torch.float32, 16, 2, 1)
    plan = plan_of(case, [0] * len(case.tables))
    for change in ({"group_start": plan.group_start + 16}, {"chunk_tokens": 128}):
        with pytest.raises(ValueError, match="chunk"):
            attend(case, dataclasses.replace(plan, **change))
