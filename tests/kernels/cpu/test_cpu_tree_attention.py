"""Native attention against a float64 oracle, over plans of every shape."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention_oracle import build_plan, fill_caches, oracle
from hypothesis import given, settings
from hypothesis import strategies as st
from native_caches import native_caches

from cotrt.kernels.cpu import native
from cotrt.kernels.cpu.tree_attention import prepare_plan, tree_attention

Groups = list[tuple[int, int, bool, list[int]]]

# float32: rounding of sums of a few hundred products, and of exp. bfloat16: the weights and the
# output are rounded to 2^-9, values are about 1.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 3e-3}


def check(
    positions: list[int],
    groups: Groups,
    *,
    block_size: int = 16,
    heads: tuple[int, int] = (6, 2),
    head_dim: int = 32,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    spare: int = 0,
) -> torch.Tensor:
    """Slots that are not the plan's hold NaN in these caches."""
    plan, pool = build_plan(block_size, positions, groups, np.random.default_rng(seed), spare)
    generator = torch.Generator().manual_seed(seed)
    k, v = fill_caches(plan, pool, heads[1], head_dim, dtype, generator)
    q = torch.randn(len(positions), heads[0], head_dim, generator=generator).to(dtype)
    scale = 1.5 * head_dim**-0.5
    out = torch.full_like(q, torch.nan)
    k_native, v_native = native_caches(k, v)
    given_out = tree_attention(
        q, k_native, v_native, prepare_plan(plan, "cpu"), scale=scale, out=out
    )
    assert given_out is out
    expected = oracle(q, k, v, plan, scale)
    assert (out.double() - expected).abs().max() < TOLERANCE[dtype]
    bare = tree_attention(q, k_native, v_native, plan, scale=scale)
    assert torch.equal(bare, out)  # the same again, whatever the threads did
    return out


def rows(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
class TestShapes:
    def test_fresh_prompt(self, dtype: torch.dtype) -> None:
        check(rows(0, 37), [(0, 37, True, rows(0, 37))], dtype=dtype)

    def test_prompt_of_several_chunks_of_keys(self, dtype: torch.dtype) -> None:
        check(rows(500, 40), [(0, 540, True, rows(0, 40))], dtype=dtype)

    @pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128, 256])
    def test_block_sizes(self, dtype: torch.dtype, block_size: int) -> None:
        check([300], [(0, 301, True, [0])], dtype=dtype, block_size=block_size)

    @pytest.mark.parametrize("head_dim", [16, 48, 64, 80, 96, 112, 128, 256])
    def test_head_dims(self, dtype: torch.dtype, head_dim: int) -> None:
        check([40] * 5, [(0, 41, False, rows(0, 5))], dtype=dtype, head_dim=head_dim)

    @pytest.mark.parametrize("heads", [(1, 1), (3, 3), (9, 3), (14, 2), (28, 4), (32, 1)])
    def test_heads(self, dtype: torch.dtype, heads: tuple[int, int]) -> None:
        check([40] * 5, [(0, 41, False, rows(0, 5))], dtype=dtype, heads=heads)

    @pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 15, 16, 17, 31, 255, 256, 257, 513])
    def test_length_of_the_last_block_and_chunk(self, dtype: torch.dtype, length: int) -> None:
        check([length - 1], [(0, length, True, [0])], dtype=dtype)

    @pytest.mark.parametrize("spare", [0, 3])
    def test_shared_prefix_with_private_tails(self, dtype: torch.dtype, spare: int) -> None:
        tails: Groups = [(32, 1 + i % 9, True, [i]) for i in range(33)]
        positions = [start + length - 1 for start, length, _, _ in tails]
        check(positions, [(0, 32, False, rows(0, 33)), *tails], spare=spare, dtype=dtype)

    def test_more_rows_than_one_job_takes(self, dtype: torch.dtype) -> None:
        check([47] * 70, [(0, 48, False, rows(0, 70))], dtype=dtype)

    def test_three_levels(self, dtype: torch.dtype) -> None:
        groups: Groups = [(0, 64, False, rows(0, 8))]
        groups += [(64, 16, False, rows(4 * i, 4)) for i in range(2)]
        groups += [(80, 3 + i, True, [i]) for i in range(8)]
        check([82 + i for i in range(8)], groups, dtype=dtype)

    def test_a_row_that_sees_nothing_of_a_group_has_weight_zero(self, dtype: torch.dtype) -> None:
        # Row 0 stands before the second group begins.
        check([10, 20], [(0, 16, True, [0, 1]), (16, 8, True, [0, 1])], dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
class TestLongRunsOfFewRows:
    """They are read in pieces, and several KV heads at a time."""

    @pytest.mark.parametrize("heads", [(1, 1), (9, 3), (8, 8), (14, 2), (32, 8)])
    def test_private_contexts(self, dtype: torch.dtype, heads: tuple[int, int]) -> None:
        lengths = [767, 768, 1301, 2100]
        groups: Groups = [(0, length, True, [i]) for i, length in enumerate(lengths)]
        check([length - 1 for length in lengths], groups, dtype=dtype, heads=heads)

    @pytest.mark.parametrize("block_size", [8, 32, 256])
    def test_block_sizes(self, dtype: torch.dtype, block_size: int) -> None:
        check([1536, 800], [(0, 1537, True, [0]), (0, 801, True, [1])], dtype=dtype,
              block_size=block_size)  # fmt: skip

    def test_a_shared_run_before_private_ones(self, dtype: torch.dtype) -> None:
        groups: Groups = [(0, 1600, False, [0, 1]), (1600, 900, True, [0]), (1600, 5, True, [1])]
        check([2499, 1604], groups, dtype=dtype)

    def test_rows_that_see_nothing_of_the_last_pieces(self, dtype: torch.dtype) -> None:
        check([300, 900, 1199], [(0, 1200, True, [0, 1, 2])], dtype=dtype, spare=2)

    def test_bits_do_not_depend_on_the_number_of_threads(self, dtype: torch.dtype) -> None:
        try:
            found = []
            for threads in (1, 2, 5):
                native.set_num_threads(threads)
                groups: Groups = [(0, 1300, True, [0]), (0, 64, True, [1]), (0, 600, True, [2])]
                found.append(check([1299, 63, 599], groups, dtype=dtype, heads=(9, 3)))
        finally:
            native.set_num_threads(None)
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], Groups, int]:
    """A shared run, maybe, and leaves that add tokens and rows of their own."""
    block_size = draw(st.sampled_from([8, 16, 32, 64]))
    shared = draw(st.integers(0, 6)) * block_size
    positions: list[int] = []
    leaves: Groups = []
    for _ in range(draw(st.integers(1, 20))):
        num_rows = draw(st.integers(1, 6))
        length = num_rows + draw(st.integers(0, 70))
        leaves.append((shared, length, True, rows(len(positions), num_rows)))
        positions += [shared + length - num_rows + i for i in range(num_rows)]
    everyone = rows(0, len(positions))
    return positions, [(0, shared, False, everyone), *leaves] if shared else leaves, block_size


@settings(max_examples=25, deadline=None)
@given(
    tree=trees(),
    heads=st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 3, 7])),
    head_dim=st.sampled_from([16, 48, 64]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    spare=st.integers(0, 1),
)
def test_any_tree(
    tree: tuple[list[int], Groups, int],
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    spare: int,
) -> None:
    positions, groups, block_size = tree
    check(
        positions,
        groups,
        block_size=block_size,
        heads=(heads[0] * heads[1], heads[0]),
        head_dim=head_dim,
        dtype=dtype,
        spare=spare,
    )


def test_error_in_bfloat16_is_at_most_that_of_torch() -> None:
    """Against float64, pooled over cases: at most 1.2 times that of torch's own attention."""
    ours, theirs = [], []
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        length = 100 + 90 * seed
        plan, pool = build_plan(16, [length - 1] * 4, [(0, length, False, rows(0, 4))])
        k, v = fill_caches(plan, pool, 2, 64, torch.bfloat16, generator)
        q = torch.randn(4, 6, 64, generator=generator).bfloat16()
        expected = oracle(q, k, v, plan, 0.125)
        found = tree_attention(q, *native_caches(k, v), plan, scale=0.125)
        blocks = torch.from_numpy(plan.group_blocks).long()
        keys, values = (
            c[blocks].transpose(1, 2).reshape(-1, 2, 64)[:length].transpose(0, 1) for c in (k, v)
        )
        torchs = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1)[None], keys[None], values[None], scale=0.125, enable_gqa=True
        )[0].transpose(0, 1)
        ours.append((found.double() - expected).square().mean())
        theirs.append((torchs.double() - expected).square().mean())
    assert torch.stack(ours).mean().sqrt() <= 1.2 * torch.stack(theirs).mean().sqrt()


def test_large_scores_do_not_overflow() -> None:
    plan, pool = build_plan(16, [40], [(0, 41, True, [0])])
    generator = torch.Generator().manual_seed(0)
    k, v = fill_caches(plan, pool, 1, 16, torch.float32, generator)
    q = torch.full((1, 1, 16), 300.0)
    k *= 300
    out = tree_attention(q, *native_caches(k, v), plan, scale=1.0)
    assert torch.allclose(out.double(), oracle(q, k, v, plan, 1.0), atol=1e-4)


def test_a_nan_query_gives_nan_and_harms_no_other_row() -> None:
    plan, pool = build_plan(16, [40, 40, 40], [(0, 41, False, [0, 1, 2])])
    k, v = fill_caches(plan, pool, 1, 16, torch.bfloat16, torch.Generator().manual_seed(0))
    q = torch.randn(3, 2, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    good = tree_attention(q, *native_caches(k, v), plan, scale=0.25)
    q[1, 0, 3] = torch.nan
    out = tree_attention(q, *native_caches(k, v), plan, scale=0.25)
    assert out[1, 0].isnan().all()
    others = [(0, 0), (0, 1), (1, 1), (2, 0), (2, 1)]
    assert all(torch.equal(out[i], good[i]) for i in others)


def test_a_plan_that_points_outside_is_refused() -> None:
    plan, pool = build_plan(16, [40], [(0, 41, True, [0])])
    k, v = fill_caches(plan, pool, 1, 16, torch.float32, torch.Generator().manual_seed(0))
    plan.group_blocks[0] = pool
    with pytest.raises(ValueError, match="outside of the cache"):
        tree_attention(torch.ones(1, 1, 16), *native_caches(k, v), plan, scale=1.0)
