"""Triton tree attention against the reference; test names and ids say which variant ran."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from attention_oracle import build_plan, oracle
from attention_trees import Tree, level_tree
from triton_plans import TOLERANCE, check, plan_of, pool_for, queries, random_tree

from cotrt.kernels.triton import attention_launch, attention_work
from cotrt.kernels.triton import tree_attention as module
from cotrt.kernels.triton.attention_variants import TILES, choose_variant, largest_tile
from cotrt.kernels.triton.attention_work import AttentionWork, Capacity, capacity_for
from cotrt.kernels.triton.tree_attention import (
    GraphPlan,
    new_graph_plan,
    prepare_plan,
    tree_attention,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize("width", [1, 3, 17, 64])
@pytest.mark.parametrize("depth", [1, 2, 3, 6])
def test_random_trees(depth: int, width: int, device: torch.device):
    rng = np.random.default_rng(depth * 100 + width)
    tree = random_tree(rng, depth, width, block_size=8)
    check(plan_of(tree), 1, 3, 64, BF16, device)


@pytest.mark.parametrize("seed", range(6))
def test_random_trees_with_prefill_and_forced_extension(seed: int, device: torch.device):
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, depth=3, width=8, block_size=16, prefill=True)
    plan = plan_of(tree, max_group_tokens=32 if seed % 2 else None)
    assert plan.group_causal.any() or seed == 0
    check(plan, 1, 4, 64, FP16, device)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_dims(head_dim: int, dtype: torch.dtype, device: torch.device):
    tree = level_tree([1, 2, 5], [32, 16, 7], block_size=16)
    check(plan_of(tree), 1, 2, head_dim, dtype, device)


@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128, 256])
def test_block_sizes(block_size: int, device: torch.device):
    tree = Tree(block_size)
    node = tree.node(None, 1)
    for tokens in (1, block_size - 1, block_size):
        tree.leaf(node, tokens)
    tree.leaf(node, 3, num_rows=3)
    check(plan_of(tree), 1, 4, 64, BF16, device)


@pytest.mark.parametrize("heads_per_kv", [1, 3, 4, 7, 8, 16])
def test_query_heads_per_kv_head(heads_per_kv: int, device: torch.device):
    tree = level_tree([1, 5], [48, 9], block_size=16)
    check(plan_of(tree), 2, heads_per_kv, 64, BF16, device)


@pytest.mark.parametrize(
    ("num_leaves", "prefill", "high_tile"), [(3, 0, 16), (8, 0, 32), (15, 0, 64), (3, 40, 128)]
)
def test_variant_of_each_tile(num_leaves, prefill, high_tile, device: torch.device):
    tree = level_tree([1, num_leaves], [64, 5], block_size=16)
    if prefill:
        tree.leaf(tree.roots[0], prefill, num_rows=prefill)
    plan = plan_of(tree)
    prepared = prepare_plan(plan, device)
    check(plan, 1, 4, 64, BF16, device, prepared)
    work = prepared.work(4, largest_tile(64, BF16))
    assert work.high_tile == high_tile
    variant = choose_variant(64, 4, 16, work.high_tile, BF16)
    assert variant.name.startswith(f"d64 g4 b16 m16/{high_tile} ")
    if high_tile > 16:  # both tiles of the launch had work
        high = work.items[: work.num_items * 8].reshape(-1, 8)[:, 5]
        assert bool(high.any()) and not bool(high.all())


def test_every_tile_is_a_variant():
    tiles = {choose_variant(128, 4, 16, tile, BF16).high_tile for tile in TILES}
    assert tiles == {16, 32, 64, 128}


def test_single_query_of_one_token(device: torch.device):
    tree = Tree(16)
    tree.leaf(tree.node(None, 0), 1)
    out = check(plan_of(tree), 2, 4, 64, FP32, device)
    plan = plan_of(tree)
    _, v = pool_for(plan, 2, 64, FP32, device)
    assert torch.allclose(out[0, 0], v[plan.group_blocks[0], 0, 0], atol=1e-6)


def test_nothing_shared_is_written_directly_with_no_merge(monkeypatch, device: torch.device):
    class NoMerge:
        def __getitem__(self, grid):
            raise AssertionError("a plain plan was merged")

    monkeypatch.setattr(module, "merge_kernel", NoMerge())
    tree = Tree(16)
    for length in (1, 16, 40):
        tree.leaf(tree.node(None, length // 16), 1 + length % 16)
    check(plan_of(tree), 2, 3, 64, BF16, device)


def test_split_runs_merge_in_order(device: torch.device):
    tree = level_tree([1, 3], [512, 200], block_size=16)
    plan = plan_of(tree, max_group_tokens=64)
    assert plan.num_groups > 8
    check(plan, 1, 4, 64, BF16, device)


def test_empty_groups_and_rows_that_see_nothing(device: torch.device):
    # Group 1 is empty; row 0 sees nothing of the causal group 2; blocks have spare entries.
    plan, pool = build_plan(
        8,
        [15, 17, 18],
        [(0, 16, False, [0, 1, 2]), (16, 0, False, [1]), (16, 3, True, [0, 1, 2])],
        spare=2,
    )
    q = queries(3, 4, 64, FP32, device)
    generator = torch.Generator().manual_seed(1)
    shape = (pool, 2, 8, 64)
    k, v = (torch.randn(shape, generator=generator).to(device) for _ in range(2))
    out = tree_attention(q, k, v, plan, scale=0.125, out=torch.full_like(q, torch.nan))
    expected = oracle(q.cpu(), k.cpu(), v.cpu(), plan, 0.125)
    torch.testing.assert_close(out.cpu().double(), expected, rtol=0, atol=TOLERANCE[FP32])


def test_empty_plan(device: torch.device):
    plan = plan_of(Tree(16))
    k = torch.zeros(1, 1, 16, 64, device=device)
    assert tree_attention(k.new_zeros(0, 4, 64), k, k, plan, scale=1.0).shape == (0, 4, 64)


def test_block_offsets_beyond_two_to_the_31_elements(device: torch.device):
    # The last block begins 2^31 + 2^20 elements into the storage; what lies between is not touched.
    stride = (1 << 31) // 3 + (1 << 20)
    stride -= stride % 64
    storage_k = torch.empty(3 * stride + 16 * 64, dtype=FP16, device=device)
    storage_v = torch.empty(3 * stride + 16 * 64, dtype=FP16, device=device)
    strides = (stride, 16 * 64, 64, 1)
    far_k = storage_k.as_strided((4, 1, 16, 64), strides)
    far_v = storage_v.as_strided((4, 1, 16, 64), strides)
    plan, _ = build_plan(16, [19, 20], [(0, 16, False, [0, 1]), (16, 5, True, [0, 1])])
    plan = dataclasses.replace(plan, group_blocks=np.array([3, 2], np.int32))
    k, v = pool_for(plan, 1, 64, FP16, device)
    for block in (2, 3):
        far_k[block], far_v[block] = k[block], v[block]
    assert 3 * stride > 1 << 31
    q = queries(2, 4, 64, FP16, device)
    near = tree_attention(q, k, v, plan, scale=0.125)
    far = tree_attention(q, far_k, far_v, plan, scale=0.125)
    assert torch.isfinite(near).all() and torch.equal(near, far)


def test_queries_as_a_view_of_the_projection(device: torch.device):
    tree = level_tree([1, 3], [16, 5], block_size=16)
    plan = plan_of(tree)
    k, v = pool_for(plan, 2, 64, FP32, device)
    qkv = queries(plan.num_rows, 6 + 2 + 2, 64, FP32, device)
    view = qkv[:, :6]
    assert not view.is_contiguous()
    expected = tree_attention(view.contiguous(), k, v, plan, scale=0.125)
    assert torch.equal(tree_attention(view, k, v, plan, scale=0.125), expected)


@pytest.mark.parametrize("programs", [1, 7])
def test_bits_do_not_depend_on_the_number_of_programs(programs, monkeypatch, device):
    tree = random_tree(np.random.default_rng(3), depth=3, width=9, block_size=8, prefill=True)
    plan = plan_of(tree, max_group_tokens=16)
    k, v = pool_for(plan, 2, 64, BF16, device)
    q = queries(plan.num_rows, 8, 64, BF16, device)
    expected = tree_attention(q, k, v, plan, scale=0.125)
    monkeypatch.setattr(attention_launch, "num_processors", lambda _: programs)
    monkeypatch.setattr(attention_launch, "programs_per_processor", lambda _: 1)
    assert torch.equal(tree_attention(q, k, v, plan, scale=0.125), expected)


def test_graph_plan_serves_one_plan_after_another_from_the_same_buffers(device: torch.device):
    rng = np.random.default_rng(11)
    trees = [random_tree(rng, depth, 6, block_size=16) for depth in (4, 1, 2)]
    plans = [plan_of(tree) for tree in trees] + [plan_of(trees[0], share=False)]
    capacity = Capacity.holding(64, 128, 128, 512)
    assert all(capacity.can_hold(capacity_for(plan, 4, 32)) for plan in plans)
    work = AttentionWork(capacity, 4, 32, device)
    work.counts._base.fill_(0x7FFFFFFF)  # whatever lies past a plan's own is never read
    graph = GraphPlan(work)
    addresses = set()
    for plan in plans:
        graph.write(plan)
        check(plan, 1, 4, 64, BF16, device, graph)
        partial, lse = graph.partials(4, 64)
        partial.fill_(torch.nan)
        lse.fill_(torch.nan)
        addresses.add((work.items.data_ptr(), partial.data_ptr(), lse.data_ptr()))
    assert len(addresses) == 1


def test_a_graph_plan_names_the_tile_of_the_graph_that_serves(device: torch.device):
    graph = new_graph_plan(6, 128, 4, 64, BF16, device)
    assert graph.tiles == (16, 64) and new_graph_plan(6, 64, 4, 64, FP32, device).tiles == (16,)
    shared = plan_of(level_tree([1, 6], [32, 9], block_size=16))
    alone = plan_of(level_tree([1, 6], [32, 9], block_size=16), share=False)
    for plan, tile in ((shared, 64), (alone, 16), (shared, 64)):
        assert graph.tile_for(plan) == tile
        graph.write(plan, tile)
        check(plan, 1, 4, 64, BF16, device, graph)
    many = plan_of(level_tree([1, 6], [32, 20 * 16], block_size=16), share=False)
    assert len(many.group_blocks) > 128 and graph.tile_for(many) is None


def test_items_stand_by_falling_cost_and_cover_every_slot_once():
    tree = random_tree(np.random.default_rng(5), depth=4, width=40, block_size=8, prefill=True)
    plan = plan_of(tree, max_group_tokens=16)
    for high_tile in (16, 64):
        made = attention_work._make_items(plan, 3, high_tile)
        slots = np.concatenate(
            [np.arange(first, first + rows) for first, rows in made.items[:, 3:5]]
        )
        assert sorted(slots) == list(range(len(plan.group_rows)))
        heads = 4  # 3 padded
        tile = np.where(made.items[:, 5] == 1, high_tile, 16)
        assert (made.items[:, 4] * heads <= tile).all()
        lengths = made.items[made.items[:, 6] == 0, 1] * (1 + made.items[made.items[:, 6] == 0, 5])
        assert (np.diff(lengths) <= 0).all()


def test_capacity_classes_are_powers_of_two():
    assert Capacity.holding(1, 65, 128, 129) == Capacity(64, 128, 128, 256)
    assert not Capacity.holding(64, 64, 64, 64).can_hold(Capacity(65, 1, 1, 1))
