"""The comparison of grouped attention with plain attention: that it runs, and its interval."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from cotrt.bench import attention
from cotrt.kernels.cpu.native import missing_reason
from cotrt.kernels.dispatch import plan_options
from cotrt.tree.attention.planner import AttentionPlanner, PlanCosts, PlanLeaf


def test_interval_holds_the_median_and_narrows() -> None:
    values = np.random.default_rng(1).lognormal(0, 0.1, 400)
    low, high = attention.bootstrap_interval(values)
    assert low <= np.median(values) <= high
    few_low, few_high = attention.bootstrap_interval(values[:20])
    assert high - low < few_high - few_low
    assert attention.bootstrap_interval(values) == (low, high)
    assert attention.bootstrap_interval(np.ones(5)) == (1.0, 1.0)


def test_the_batch_that_shares_nothing_has_exactly_the_plain_plan() -> None:
    shape = attention.Shape(shared=0, own=300, branches=5)
    leaves, _ = attention._leaves(shape, 40)
    costs = PlanCosts(**plan_options("cpu", *shape.heads, 2))
    ours = AttentionPlanner(attention.BLOCK, costs).plan(leaves)
    root = attention._Node(None, (), 0)
    for i, leaf in enumerate(leaves):
        alone = AttentionPlanner(attention.BLOCK, costs).plan(
            [PlanLeaf(root, attention._all(leaf), leaf.context_len, 1)]
        )
        # The plan of a leaf alone, row i for its row 0, is what the batch has for it.
        blocks = ours.group_blocks[slice(*ours.group_block_offsets[i : i + 2])]
        assert np.array_equal(blocks, alone.group_blocks)
        assert ours.group_rows[i] == i and ours.row_partials[i] == -1
        for name in ("group_start", "group_len", "group_causal"):
            assert getattr(ours, name)[i] == getattr(alone, name)[0]
    assert ours.num_groups == len(leaves)
    shared = dataclasses.replace(shape, shared=304)
    leaves, _ = attention._leaves(shared, 40)
    assert AttentionPlanner(attention.BLOCK, costs).plan(leaves).num_groups > len(leaves)


@pytest.mark.skipif(missing_reason() is not None, reason="needs the native kernels")
def test_both_comparisons_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    arguments = "--heads 4,2,32 --branches 4 --shared 100 --own 20 --context 60 --layers 2"
    assert attention.main([*arguments.split(), "--pairs", "40", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())
    assert len(rows) == 2
    for row in rows.values():
        assert 0 < row["low"] <= row["ratio"] <= row["high"] and row["pairs"] == 40
    assert capsys.readouterr().out.count("40 pairs") == 2
