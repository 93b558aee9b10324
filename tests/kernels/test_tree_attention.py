"""Reference attention against a float64 oracle, over plans of every shape."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention_oracle import build_plan, fill_caches, oracle
from hypothesis import given, settings
from hypothesis import strategies as st

from cotrt.kernels.reference import tree_attention as module
from cotrt.kernels.reference.tree_attention import prepare_plan, tree_attention

Groups = list[tuple[int, int, bool, list[int]]]

# float32: rounding of sums of a few hundred products. 16 bits: the output's own rounding (2^-9
# and 2^-11 relative, values of about 1), for inputs are equal and sums are float32.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.fixture(params=["flash", "plain"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "plain":
        monkeypatch.setattr(module, "_has_flash", lambda: False)
    elif not module._has_flash():
        pytest.skip("this torch has no flash op with a log-sum-exp")
    return str(request.param)


def check(
    positions: list[int],
    groups: Groups,
    *,
    block_size: int = 8,
    heads: tuple[int, int] = (6, 2),
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    spare: int = 0,
) -> torch.Tensor:
    plan, pool = build_plan(block_size, positions, groups, np.random.default_rng(seed), spare)
    generator = torch.Generator().manual_seed(seed)
    k, v = fill_caches(plan, pool, heads[1], head_dim, dtype, generator)
    q = torch.randn(len(positions), heads[0], head_dim, generator=generator).to(dtype)
    scale = 1.5 * head_dim**-0.5
    out = torch.full_like(q, torch.nan)
    given_out = tree_attention(q, k, v, prepare_plan(plan, "cpu"), scale=scale, out=out)
    assert given_out is out
    expected = oracle(q, k, v, plan, scale)
    assert (out.double() - expected).abs().max() < TOLERANCE[dtype]
    bare = tree_attention(q, k, v, plan, scale=scale)
    assert torch.equal(bare, out)
    return out


def leaf_rows(first: int, num_rows: int) -> list[int]:
    return list(range(first, first + num_rows))


class TestShapes:
    def test_fresh_prompt(self, path: str) -> None:
        check(leaf_rows(0, 37), [(0, 37, True, leaf_rows(0, 37))])

    def test_chunk_of_a_prompt_sees_its_earlier_tokens(self, path: str) -> None:
        check(leaf_rows(20, 17), [(0, 37, True, leaf_rows(0, 17))])

    def test_one_decode_row(self, path: str) -> None:
        check([40], [(0, 41, True, [0])])

    @pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 17])
    def test_last_block_with_one_token_or_full(self, path: str, length: int) -> None:
        check([length - 1], [(0, length, True, [0])])

    @pytest.mark.parametrize("spare", [0, 3])
    def test_shared_prefix_with_private_tails(self, path: str, spare: int) -> None:
        tails = [(32, 1 + i % 9, True, [i]) for i in range(12)]
        positions = [start + length - 1 for start, length, _, _ in tails]
        check(positions, [(0, 32, False, leaf_rows(0, 12)), *tails], spare=spare)

    def test_one_row_in_many_groups(self, path: str) -> None:
        groups: Groups = [(8 * i, 8, False, [0, 1]) for i in range(30)]
        check([240, 242], [*groups, (240, 1, True, [0]), (240, 3, True, [1])])

    def test_groups_that_a_row_sees_nothing_of_weigh_nothing(self, path: str) -> None:
        # Row 0 is before the second group, rows 0 and 1 before the third, nobody sees the fourth.
        groups: Groups = [
            (0, 8, True, [0, 1, 2]),
            (8, 8, True, [0, 1, 2]),
            (16, 4, True, [0, 1, 2]),
        ]
        check([5, 9, 18], [*groups, (24, 3, True, [0, 2])])

    def test_causal_group_of_another_position_than_the_rows(self, path: str) -> None:
        check([3, 9, 4], [(0, 12, True, [2, 0, 1])])

    def test_continuations_of_unlike_lengths(self, path: str) -> None:
        positions, groups, rows = [], [(0, 24, False, leaf_rows(0, 20))], 0
        for count in (2, 3, 7, 5, 3):
            groups.append((24, count, True, leaf_rows(rows, count)))
            positions += leaf_rows(24, count)
            rows += count
        check(positions, groups)

    def test_mixed_batch(self, path: str) -> None:
        positions = [*range(20, 30), 41, 50, 51, 52, 0]
        groups: Groups = [
            (0, 16, False, leaf_rows(0, 11)),
            (16, 14, True, leaf_rows(0, 10)),
            (16, 26, True, [10]),
            (0, 53, True, [11, 12, 13]),
            (0, 1, True, [14]),
        ]
        check(positions, groups)

    def test_plan_without_rows(self) -> None:
        plan, _ = build_plan(8, [], [])
        q = torch.empty(0, 4, 8)
        assert tree_attention(q, *torch.zeros(2, 1, 2, 8, 8), plan, scale=1.0).shape == (0, 4, 8)

    def test_group_without_rows_is_skipped(self, path: str) -> None:
        check([4], [(0, 5, True, [0]), (0, 8, False, [])])


@pytest.mark.parametrize("heads", [(1, 1), (9, 3), (5, 5), (14, 2), (7, 1)])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_heads_and_dtypes(path: str, heads: tuple[int, int], dtype: torch.dtype) -> None:
    tails: Groups = [(16, 5 + i, True, [2 * i, 2 * i + 1]) for i in range(4)]
    positions = [p for start, n, _, _ in tails for p in (start + n - 2, start + n - 1)]
    groups = [(0, 16, False, leaf_rows(0, 8)), *tails]
    check(positions, groups, heads=heads, head_dim=20, dtype=dtype)


def test_rows_are_taken_in_chunks_when_scores_would_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_has_flash", lambda: False)
    monkeypatch.setattr(module, "MAX_SCORES", 100)
    check(leaf_rows(10, 30), [(0, 16, False, leaf_rows(6, 24)), (16, 24, True, leaf_rows(6, 24)),
                              (0, 16, True, leaf_rows(0, 6))])  # fmt: skip


def test_extreme_scores_do_not_overflow(path: str) -> None:
    plan, pool = build_plan(8, [20], [(0, 16, False, [0]), (16, 5, True, [0])])
    k, v = fill_caches(plan, pool, 1, 8, torch.float32, torch.Generator().manual_seed(0))
    q = torch.full((1, 1, 8), 500.0)
    out = tree_attention(q, k, v, plan, scale=1.0)
    assert (out.double() - oracle(q, k, v, plan, 1.0)).abs().max() < 1e-3


def test_alike_tails_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    tails: Groups = [(64, 1 + i, True, [i]) for i in range(32)]
    plan, _ = build_plan(16, leaf_rows(64, 32), [(0, 64, False, leaf_rows(0, 32)), *tails])
    prepared = prepare_plan(plan, "cpu")
    assert [(t.num_groups, t.num_rows) for t in prepared.tiles] == [(32, 1), (1, 32)]


def test_shared_run_is_gathered_once_for_all_its_rows() -> None:
    groups: Groups = [(0, 64, False, leaf_rows(0, 32))]
    plan, _ = build_plan(16, [70] * 32, groups + [(64, 7, True, [i]) for i in range(32)])
    gathered = torch.cat([tile.blocks for tile in prepare_plan(plan, "cpu").tiles])
    for block in plan.group_blocks[:4]:
        assert (gathered == int(block)).sum() == 1


@st.composite
def trees(draw: st.DrawFn) -> tuple[int, list[int], Groups]:
    """A random tree of runs, leaves with rows at their ends, some edges cut into more groups."""
    block_size = draw(st.sampled_from([8, 16]))
    positions: list[int] = []
    groups: Groups = []

    def grow(start: int, depth: int) -> list[int]:
        rows: list[int] = []
        blocks = draw(st.integers(0, 3))
        at = len(groups)
        end = start + blocks * block_size
        for _ in range(draw(st.integers(0, 3)) if depth < 3 else 0):
            rows += grow(end, depth + 1)
        if not rows:
            length = draw(st.integers(1, 2 * block_size + 1))
            count = draw(st.integers(1, min(length, 5)))
            rows = list(range(len(positions), len(positions) + count))
            positions.extend(range(end + length - count, end + length))
            groups.append((end, length, True, rows))
        cut = draw(st.integers(0, blocks))
        for first, last in ((0, cut), (cut, blocks)):
            if first < last:
                run = (start + first * block_size, (last - first) * block_size)
                groups.insert(at, (*run, draw(st.booleans()), list(rows)))
        return rows

    for _ in range(draw(st.integers(1, 3))):
        grow(0, 0)
    # Rows name their partials from root to leaf: order groups by where they start.
    return block_size, positions, sorted(groups, key=lambda g: g[0])


@settings(max_examples=60, deadline=None)
@given(trees(), st.sampled_from([(2, 1), (3, 3), (6, 2)]), st.booleans(), st.integers(0, 99))
def test_random_trees(
    tree: tuple[int, list[int], Groups], heads: tuple[int, int], flash: bool, seed: int
) -> None:
    block_size, positions, groups = tree
    with pytest.MonkeyPatch.context() as patch:
        if not flash:
            patch.setattr(module, "_has_flash", lambda: False)
        check(positions, groups, block_size=block_size, heads=heads, head_dim=8, seed=seed)
