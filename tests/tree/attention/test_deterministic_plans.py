"""Deterministic plans: whole chunks counted from position 0, whatever is shared, at any cost."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from attention_trees import COSTS, Tree, check_plan, cost_constants, level_tree, small_trees
from hypothesis import given, settings
from hypothesis import strategies as st

from cotrt.plan import AttentionPlan
from cotrt.tree.attention.planner import AttentionPlanner, PlanCosts, modelled_cost

CHUNK = 8  # of the small trees, whose blocks are 2 or 4


def check_chunks(plan: AttentionPlan, chunk: int) -> None:
    assert plan.chunk_tokens == chunk
    assert (plan.group_start % chunk == 0).all()
    assert (plan.group_len[plan.group_start > 0] <= chunk).all()
    group = np.repeat(np.arange(plan.num_groups), np.diff(plan.group_row_offsets))
    start, end = plan.group_start, plan.group_start + plan.group_len
    for row, position in enumerate(plan.query_positions.tolist()):
        mine = group[plan.group_rows == row].tolist()
        # Root to leaf; each but the last is whole, so that the chunks are those of the row alone.
        assert [start[g] for g in mine] == [0, *(end[g] for g in mine[:-1])]
        assert all(end[g] % chunk == 0 for g in mine[:-1])
        assert end[mine[-1]] > position


@settings(max_examples=200, deadline=None)
@given(
    tree=small_trees(multi_row=True, max_edges=20),
    costs=cost_constants,
    max_group_tokens=st.sampled_from([None, 8, 16]),
    parallel_groups=st.sampled_from([0, 3, 20]),
)
def test_every_row_is_cut_at_multiples_of_a_chunk(tree, costs, max_group_tokens, parallel_groups):
    costs = dataclasses.replace(
        costs, max_group_tokens=max_group_tokens, parallel_groups=parallel_groups
    )
    plan = AttentionPlanner(tree.block_size, costs, chunk_tokens=CHUNK).plan(tree.leaves)
    check_plan(plan, tree.leaves, tree.block_size)
    check_chunks(plan, CHUNK)


@settings(max_examples=80, deadline=None)
@given(tree=small_trees(max_edges=16), costs=cost_constants, steps=st.integers(1, 30))
def test_plans_that_advance_are_cut_there_too(tree: Tree, costs: PlanCosts, steps: int):
    planner = AttentionPlanner(tree.block_size, costs, spare_blocks=3, chunk_tokens=CHUNK)
    planner.plan(tree.leaves)
    for _ in range(steps):
        new_blocks = tree.grow()
        plan = planner.advance(new_blocks) or planner.plan(tree.leaves)
        check_plan(plan, tree.leaves, tree.block_size)
        check_chunks(plan, CHUNK)


def test_a_shared_prefix_of_whole_chunks_is_read_once():
    tree = level_tree([1, 32], [1024, 40], block_size=16)
    plan = AttentionPlanner(16, COSTS, chunk_tokens=256).plan(tree.leaves)
    assert plan.num_groups == 33
    assert plan.group_len.tolist() == [1024] + [40] * 32
    assert modelled_cost(plan, COSTS) == modelled_cost(
        AttentionPlanner(16, COSTS).plan(tree.leaves), COSTS
    )


def test_the_shared_part_of_a_chunk_is_read_with_each_tail():
    tree = level_tree([1, 32], [1008, 40], block_size=16)
    plan = AttentionPlanner(16, COSTS, chunk_tokens=256).plan(tree.leaves)
    # 768 shared tokens; each branch's chunk at 768 holds 240 of the prefix, 1024 the rest.
    assert sorted(plan.group_len.tolist()) == [24] * 32 + [256] * 32 + [768]
    assert plan.group_start.max() == 1024


def test_a_prompt_alone_is_one_group_without_a_merge():
    tree = Tree(block_size=16)
    tree.leaf(tree.node(None, 60), 1000, num_rows=1000)
    plan = AttentionPlanner(16, dataclasses.replace(COSTS, max_group_tokens=1024), chunk_tokens=256)
    assert plan.plan(tree.leaves).group_len.tolist() == [1960]


@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128, 256])
def test_any_block_size_gives_the_same_cuts(block_size: int):
    tree = level_tree([1, 4], [512, 300], block_size)
    plan = AttentionPlanner(block_size, COSTS, chunk_tokens=256).plan(tree.leaves)
    check_plan(plan, tree.leaves, block_size)
    assert sorted(set(plan.group_start.tolist())) == [0, 512, 768]


def test_a_lone_branch_grows_over_chunks_without_a_new_plan():
    tree = Tree(block_size=16)
    tree.leaf(tree.node(None, 15), 10)
    planner = AttentionPlanner(16, COSTS, chunk_tokens=256)
    planner.plan(tree.leaves)
    for _ in range(40):
        plan = planner.advance(tree.grow())
        assert plan is not None and plan.num_groups == 1
    assert plan.group_len.tolist() == [290]


def test_a_branch_that_shares_gets_a_new_group_with_its_next_chunk():
    tree = level_tree([1, 4], [1024, 250], block_size=16)
    planner = AttentionPlanner(16, COSTS, chunk_tokens=256)
    planner.plan(tree.leaves)
    grown = [planner.advance(tree.grow()) is not None for _ in range(7)]
    assert grown == [True] * 6 + [False]
    plan = planner.plan(tree.leaves)
    assert plan.group_len.tolist() == [1024] + [256, 1] * 4
    check_chunks(plan, 256)
