"""Fixed order and fixed chunks: a row's bits are its own, whatever is computed beside it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from chunk_cases import Case, exact, make_case, one_by_one, plan_of, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from native_caches import native_caches

from cotrt.kernels.cpu.linear import PackedWeight
from cotrt.kernels.cpu.tree_attention import prepare_plan, tree_attention
from cotrt.plan import AttentionPlan

KINDS = [torch.float32, torch.bfloat16, torch.int8]


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


def attend(case: Case, plan: AttentionPlan) -> torch.Tensor:
    k, v = native_caches(case.k, case.v)
    return tree_attention(case.q, k, v, prepare_plan(plan), scale=0.25)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 1), (4, 2), (9, 3), (14, 2)])
@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 10**6), splits=st.randoms(use_true_random=False))
def test_attention_gives_a_row_the_same_bits_in_any_plan(
    dtype: torch.dtype, heads: int, kv_heads: int, seed: int, splits: object
) -> None:
    case = make_case(seed, dtype, 16, heads, kv_heads)
    expected = one_by_one(case, attend)
    assert (expected - exact(case, 0.25)).abs().max() < (3e-6 if dtype == torch.float32 else 2e-2)
    stem = case.shared // case.chunk
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


def test_plans_that_are_not_made_of_chunks_are_refused() -> None:
    case = make_case(0, torch.float32, 16, 2, 1)
    plan = plan_of(case, [0] * len(case.tables))
    for change in ({"group_start": plan.group_start + 16}, {"chunk_tokens": 128}):
        with pytest.raises(ValueError, match="chunk"):
            attend(case, dataclasses.replace(plan, **change))
