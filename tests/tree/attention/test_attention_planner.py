"""The planner: exact coverage, the least cost, the published tree shapes, growth by a token."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import pytest
from attention_trees import (
    COSTS,
    Tree,
    brute_force_cost,
    check_plan,
    cost_constants,
    level_tree,
    small_trees,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from cotrt.plan import AttentionPlan
from cotrt.tree.attention.planner import (
    AttentionPlanner,
    PlanCosts,
    PlanLeaf,
    modelled_bytes,
    modelled_cost,
    roofline_us,
)

PUBLISHED = [
    ([1, 10], [4000, 400], 33.4),
    ([1, 1024], [2048, 32], 210.2),
    ([1, 4, 16, 512], [1024, 256, 128, 32], 147.2),
    ([1, 2, 4, 8, 16, 32, 64, 128, 1024], [16] * 9, 197.9),
    ([1, 8, 16, 32, 64, 256, 1024], [256, 128, 64, 16, 16, 16, 16], 248.3),
]


@pytest.mark.parametrize(("widths", "lengths", "limit_mb"), PUBLISHED)
def test_published_tree_shapes_move_no_more_bytes_than_the_optimum(widths, lengths, limit_mb):
    tree = level_tree(widths, lengths, block_size=16)
    plan = AttentionPlanner(16, COSTS).plan(tree.leaves)
    moved = modelled_bytes(plan, COSTS)
    print(f"{widths}/{lengths}: {moved / 1e6:.1f} MB, {roofline_us(moved):.1f} us at 4.3 TB/s")
    assert round(moved / 1e6, 1) <= limit_mb
    assert plan.num_rows == widths[-1]


@settings(max_examples=120, deadline=None)
@given(tree=small_trees(), costs=cost_constants)
def test_cost_is_the_least_over_every_split_and_merge(tree: Tree, costs: PlanCosts):
    if any(tree.end(leaf.node) == leaf.context_len for leaf in tree.leaves):
        # Such leaves can share without a merge; against a merge's own cost only plain is weighed.
        costs = dataclasses.replace(costs, merge_overhead_bytes=0)
    plan = AttentionPlanner(tree.block_size, costs).plan(tree.leaves)
    assert modelled_cost(plan, costs) == brute_force_cost(tree, costs)


@settings(max_examples=250, deadline=None)
@given(
    tree=small_trees(multi_row=True, max_edges=20),
    costs=cost_constants,
    max_group_tokens=st.sampled_from([None, 4, 8, 12]),
    parallel_groups=st.sampled_from([0, 3, 20]),
)
def test_every_row_covers_its_own_positions_once(tree, costs, max_group_tokens, parallel_groups):
    costs = dataclasses.replace(
        costs,
        max_group_tokens=max_group_tokens,
        parallel_groups=parallel_groups,
        min_group_tokens=2,
    )
    plan = AttentionPlanner(tree.block_size, costs).plan(tree.leaves)
    check_plan(plan, tree.leaves, tree.block_size)


@settings(max_examples=80, deadline=None)
@given(tree=small_trees(max_edges=16), costs=cost_constants, steps=st.integers(1, 30))
def test_advance_equals_the_tree_grown_by_hand(tree: Tree, costs: PlanCosts, steps: int):
    planner = AttentionPlanner(tree.block_size, costs, spare_blocks=3)
    planner.plan(tree.leaves)
    old: list[tuple[AttentionPlan, list[PlanLeaf]]] = []
    for _ in range(steps):
        plan = planner.advance(tree.grow()) or planner.plan(tree.leaves)
        old.append((plan, [dataclasses.replace(leaf) for leaf in tree.leaves]))
    for plan, leaves in old:  # earlier plans were not changed by later ones
        check_plan(plan, leaves, tree.block_size)


def test_spare_entries_last_for_many_steps():
    tree = level_tree([1, 4], [64, 5], block_size=8)
    planner = AttentionPlanner(8, COSTS)
    planner.plan(tree.leaves)
    steps = 0
    while True:
        steps += 1
        length = 5 + steps
        new = [(i, tree.take(1)[0]) for i in range(4)] if length % 8 == 1 else []
        if planner.advance(new) is None:
            break
    assert steps == 3 + 8 * 8 + 1  # the block begun, eight spare ones, and one token too many
    assert planner.advance([]) is None


def test_advance_refuses_what_it_cannot_grow():
    tree = Tree(8)
    node = tree.node(None, 64)
    tree.leaf(node, 12, num_rows=12)
    planner = AttentionPlanner(8, COSTS)
    assert planner.advance([]) is None
    planner.plan(tree.leaves)
    assert planner.advance([]) is None  # several rows

    bare = level_tree([1, 8], [512, 0], block_size=8)
    plan = planner.plan(bare.leaves)
    assert plan.num_groups == 1  # nobody has a token of its own: one group, written directly
    assert (plan.row_partials == -1).all()
    assert planner.advance([]) is None


def test_leaves_without_a_token_of_their_own_share_one_group_at_no_cost():
    tree = level_tree([1, 3], [16, 0], block_size=8)
    dear = PlanCosts(kv_bytes_per_token=1, partial_bytes_per_row=1000)
    plan = AttentionPlanner(8, dear).plan(tree.leaves)
    assert plan.num_groups == 1 and plan.group_rows.tolist() == [0, 1, 2]
    check_plan(plan, tree.leaves, 8)


def test_advance_asserts_that_a_new_block_was_given():
    tree = level_tree([1, 2], [64, 8], block_size=8)
    planner = AttentionPlanner(8, COSTS)
    planner.plan(tree.leaves)
    with pytest.raises(AssertionError, match="new block was not given"):
        planner.advance([])


def test_a_batch_that_shares_nothing_has_the_plain_plan():
    tree = Tree(16)
    for length in (40, 1, 16, 333):
        tree.leaf(tree.node(None, length // 16), 1 + length % 16)
    plan = AttentionPlanner(16, COSTS).plan(tree.leaves)
    assert plan.num_groups == 4
    assert (plan.group_start == 0).all()
    assert plan.group_rows.tolist() == [0, 1, 2, 3]
    assert plan.row_partials.tolist() == [-1] * 4
    assert not plan.group_causal.any()


def test_little_sharing_gives_way_to_the_plain_plan():
    tree = level_tree([1, 2], [16, 200], block_size=16)
    plan = AttentionPlanner(16, COSTS).plan(tree.leaves)
    assert plan.num_groups == 2 and (plan.row_partials == -1).all()

    wide = level_tree([1, 64], [256, 32], block_size=16)
    assert AttentionPlanner(16, COSTS).plan(wide.leaves).num_groups == 65
    dear = dataclasses.replace(COSTS, merge_overhead_bytes=10**9)
    assert AttentionPlanner(16, dear).plan(wide.leaves).num_groups == 64
    # A plain plan that is split along KV merges anyway.
    split = dataclasses.replace(dear, max_group_tokens=256)
    assert AttentionPlanner(16, split).plan(wide.leaves).num_groups == 65


def test_long_runs_are_split_at_whole_blocks():
    tree = level_tree([1, 2], [4096, 1000], block_size=16)
    costs = dataclasses.replace(COSTS, max_group_tokens=512)
    plan = AttentionPlanner(16, costs).plan(tree.leaves)
    assert plan.group_len.max() <= 512
    assert plan.num_groups == 8 + 2 + 2
    assert (plan.group_start % 16 == 0).all()
    check_plan(plan, tree.leaves, 16)


def test_few_groups_are_split_further_to_keep_the_device_busy():
    tree = Tree(16)
    tree.leaf(tree.node(None, 256), 5)
    costs = dataclasses.replace(COSTS, parallel_groups=64, min_group_tokens=128)
    assert AttentionPlanner(16, costs).plan(tree.leaves).group_len.max() <= 128
    busy = level_tree([64, 64], [1024, 5], block_size=16)
    assert AttentionPlanner(16, costs).plan(busy.leaves).group_len.max() > 1000


def test_chunked_prefill_is_not_split_into_partials_dearer_than_its_keys():
    tree = Tree(16)
    tree.leaf(tree.node(None, 128), 2048, num_rows=2048)
    costs = dataclasses.replace(COSTS, max_group_tokens=256)
    plan = AttentionPlanner(16, costs).plan(tree.leaves)
    assert plan.num_groups == 1 and plan.group_causal.tolist() == [1]


def test_causal_only_where_a_row_does_not_see_the_whole_group():
    tree = Tree(8)
    node = tree.node(None, 512)
    tree.leaf(node, 3)
    tree.leaf(node, 9, num_rows=4)
    plan = AttentionPlanner(8, COSTS).plan(tree.leaves)
    assert plan.num_groups == 3
    causal = dict(zip(plan.group_len.tolist(), plan.group_causal.tolist(), strict=True))
    assert causal == {4096: 0, 3: 0, 9: 1}


def test_row_at_the_last_position_of_the_node_sees_only_ancestors():
    tree = Tree(8)
    node = tree.node(None, 512)
    tree.leaf(node, 5, num_rows=6)  # the first row is position 4095, in the node
    tree.leaf(node, 7)
    plan = AttentionPlanner(8, COSTS).plan(tree.leaves)
    assert plan.query_positions.tolist() == [4095, 4096, 4097, 4098, 4099, 4100, 4102]
    low, high = plan.row_partial_offsets[:2]
    assert plan.row_partials[low:high].tolist() == [-1]
    check_plan(plan, tree.leaves, 8)


def test_chains_of_thousands_of_nodes_and_shared_ones():
    tree = Tree(8)
    node = tree.node(None, 1)
    for _ in range(20_000):
        node = tree.node(node, 1)
    for _ in range(3):
        tree.leaf(node, 5)
    plan = AttentionPlanner(8, COSTS).plan(tree.leaves)
    assert plan.num_groups == 4
    assert plan.group_len.max() == 20_001 * 8


def test_caterpillar_with_a_leaf_at_every_node():
    tree = Tree(8)
    node = tree.node(None, 4)
    for index in range(200):
        tree.leaf(node, 1 + index % 8)
        node = tree.node(node, 1 + index % 3)
    tree.leaf(node, 2)
    plan = AttentionPlanner(8, COSTS).plan(tree.leaves)
    check_plan(plan, tree.leaves, 8)
    plain = sum(leaf.context_len for leaf in tree.leaves) * COSTS.kv_bytes_per_token
    assert modelled_bytes(plan, COSTS) < plain / 3


def test_empty_step_has_an_empty_plan():
    plan = AttentionPlanner(16, COSTS).plan([])
    assert plan.num_groups == 0 and plan.num_rows == 0
    assert plan.row_partial_offsets.tolist() == [0]


def test_time_of_planning_and_advancing_is_printed():
    tree = level_tree([1, 16, 256], [1024, 256, 200], block_size=16)
    planner = AttentionPlanner(16, COSTS)
    plan_times, step_times = [], []
    for _ in range(5):
        begin = time.perf_counter()
        plan = planner.plan(tree.leaves)
        plan_times.append(time.perf_counter() - begin)
    new = [(index, block) for index, block in enumerate(tree.take(256))]
    for step in range(128):
        begin = time.perf_counter()
        grown = planner.advance(new if step % 16 == 8 else [])
        step_times.append(time.perf_counter() - begin)
        assert grown is not None
    print(
        f"256 leaves, 3 levels: plan {min(plan_times) * 1e3:.2f} ms, advance mean "
        f"{np.mean(step_times) * 1e6:.0f} us, worst {max(step_times) * 1e6:.0f} us"
    )
    assert plan.num_groups == 1 + 16 + 256
