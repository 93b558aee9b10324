r"""Turn the scheduled part of the KV tree into the work list of tree attention.

``plan`` is for a step whose structure is new: it compresses the tree (``forest``), chooses what is
read together (``groups``) and lays out the arrays. ``advance`` is for a step in which every leaf
only grew by one token: the same structure, longer.

    node   [ 64 tokens ]                    group 0: 4 blocks, rows 0 1 2
           /     |     \
    leaf  [5]   [9]   [2]                   groups 1, 2, 3: one block and one row each

    row_partials: row 0 -> slots 0, 3; row 1 -> slots 1, 4; row 2 -> slots 2, 5

In a deterministic plan (`AttentionPlan.chunk_tokens`) runs are shared by whole chunks only, and
what is split is split into chunks. Which groups there are is still a matter of cost alone: a row's
chunks are the same, and added up in the same order, in one group and in several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cotrt.plan import AttentionPlan, Int32, Int64
from cotrt.tree.attention.costs import PlanCosts, modelled_bytes, modelled_cost, roofline_us
from cotrt.tree.attention.forest import (
    Forest,
    PlanLeaf,
    PlanNode,
    build_forest,
    in_whole_chunks,
    nodes_up,
    ranges,
)
from cotrt.tree.attention.groups import Choice, choose_groups

__all__ = [
    "CHUNK_TOKENS",
    "AttentionPlanner",
    "PlanCosts",
    "PlanLeaf",
    "PlanNode",
    "modelled_bytes",
    "modelled_cost",
    "roofline_us",
]


# Of deterministic plans: the most that a backend takes in one softmax pass, and the largest block.
CHUNK_TOKENS = 256


@dataclass(slots=True)
class _Runs:
    """Groups before they are split along KV, upper levels first."""

    blocks: Int32
    block_begin: Int64  # [G]
    block_end: Int64  # [G], spare entries not included
    start: Int64
    length: Int64
    rows: Int64
    row_count: Int64
    leaf: Int64  # [G] the leaf whose last group this is, or -1


@dataclass(slots=True)
class _Growth:
    """What ``advance`` needs to know of the last plan."""

    plan: AttentionPlan
    leaf_group: Int64  # [leaves] the last group of each
    next_entry: Int64  # [leaves] where its next block id goes
    last_entry: Int64  # [leaves] where its run ends, spare entries included


class AttentionPlanner:
    """One planner for every backend; its cost constants belong to the backend.

    Args:
        block_size: tokens a block.
        costs: what a group, a token and a partial cost.
        spare_blocks: entries kept free at the end of each leaf's run, so that ``advance`` works
            for ``spare_blocks * block_size`` tokens or more before ``plan`` is needed again.
        chunk_tokens: 0, or ``CHUNK_TOKENS`` for deterministic plans.
    """

    def __init__(
        self, block_size: int, costs: PlanCosts, *, spare_blocks: int = 8, chunk_tokens: int = 0
    ) -> None:
        assert block_size > 0 and spare_blocks >= 0
        assert chunk_tokens % block_size == 0, "a chunk is whole blocks"
        self._block_size = block_size
        self._costs = costs
        self._spare_blocks = spare_blocks
        self._chunk_tokens = chunk_tokens
        self._growth: _Growth | None = None

    def plan(self, leaves: Sequence[PlanLeaf]) -> AttentionPlan:
        """The work list for these leaves; rows of leaf i come after those of leaf i - 1."""
        self._growth = None
        if not leaves:
            return _empty_plan(self._block_size, self._chunk_tokens)
        forest = build_forest(leaves, self._block_size)
        if self._chunk_tokens:
            forest = in_whole_chunks(forest, self._chunk_tokens)
        own = forest.leaf >= 0
        path_len = (forest.start + forest.length)[own]
        pieces, _ = self._pieces(np.zeros_like(path_len), path_len, forest.num_rows[own])
        choice = choose_groups(
            forest,
            self._costs,
            merges_anyway=bool(pieces.max() > 1),
            chunk_tokens=self._chunk_tokens,
        )
        can_advance = len(forest.positions) == len(leaves)
        runs = self._lay_out(leaves, forest, choice, self._spare_blocks if can_advance else 0)
        plan, last_group = self._split(runs, forest.positions)
        if can_advance:
            self._growth = self._remember(plan, runs, last_group, len(leaves))
        return plan

    def advance(self, new_blocks: Sequence[tuple[int, int]]) -> AttentionPlan | None:
        """The last plan with every leaf one token longer.

        Args:
            new_blocks: ``(leaf index, block id)`` for each leaf whose new token begins a block
                that was not among its private blocks yet.

        Returns:
            A plan of its own arrays where they differ; or None where the last plan cannot grow
            (a leaf had several rows or no token of its own, its spare entries are used up, or its
            last group is a chunk and full): then plan afresh.
        """
        growth = self._growth
        if growth is None:
            return None
        last = growth.plan
        if self._chunk_tokens:
            is_full = last.group_len[growth.leaf_group] == self._chunk_tokens
            if (is_full & (last.group_start[growth.leaf_group] > 0)).any():
                self._growth = None
                return None
        group_blocks = last.group_blocks
        if len(new_blocks):
            pairs = np.array(new_blocks, np.int64)
            leaf = pairs[:, 0]
            entry = growth.next_entry[leaf]
            if (entry >= growth.last_entry[leaf]).any():
                self._growth = None
                return None
            group_blocks = group_blocks.copy()
            group_blocks[entry] = pairs[:, 1]
            growth.next_entry[leaf] = entry + 1
        group_len = last.group_len.copy()
        group_len[growth.leaf_group] += 1
        held = growth.next_entry - last.group_block_offsets[growth.leaf_group]
        assert (group_len[growth.leaf_group] <= held * self._block_size).all(), (
            "a leaf grew past its blocks: its new block was not given"
        )
        growth.plan = AttentionPlan(
            block_size=last.block_size,
            query_positions=last.query_positions + np.int32(1),
            group_blocks=group_blocks,
            group_block_offsets=last.group_block_offsets,
            group_start=last.group_start,
            group_len=group_len,
            group_rows=last.group_rows,
            group_row_offsets=last.group_row_offsets,
            group_causal=last.group_causal,
            row_partials=last.row_partials,
            row_partial_offsets=last.row_partial_offsets,
            chunk_tokens=last.chunk_tokens,
        )
        return growth.plan

    def _lay_out(
        self, leaves: Sequence[PlanLeaf], forest: Forest, choice: Choice, spare: int
    ) -> _Runs:
        """One run of blocks and one slice of rows for every group of ``choice``."""
        ends = np.flatnonzero(choice.is_end)
        blocks: list[int] = []
        begin: list[int] = []
        end: list[int] = []
        spare_entries = [0] * spare
        parent, starts = forest.parent.tolist(), forest.start.tolist()
        merged, owner = choice.merged[ends].tolist(), forest.leaf[ends].tolist()
        first: list[int] = []  # topmost run of each group
        for run, num_merged, leaf in zip(ends.tolist(), merged, owner, strict=True):
            begin.append(len(blocks))
            above = [run]
            for _ in range(num_merged):
                above.append(parent[above[-1]])
            first.append(above[-1])
            # In whole chunks a group may begin inside a run above its topmost.
            parts: list[Sequence[int]] = []
            for node in nodes_up(forest, parent, run):
                skip = (starts[above[-1]] - node.start) // self._block_size
                if skip >= len(node.blocks):
                    break
                parts.append(node.blocks[skip:] if skip > 0 else node.blocks)
            for part in reversed(parts):
                blocks.extend(part)
            if leaf >= 0:
                blocks.extend(leaves[leaf].private_blocks)
            end.append(len(blocks))
            if leaf >= 0:
                blocks.extend(spare_entries)
        start = forest.start[first]
        length = (forest.start + forest.length)[ends] - start
        block_begin, block_end = np.array(begin, np.int64), np.array(end, np.int64)
        assert ((block_end - block_begin) * self._block_size >= length).all(), (
            "a leaf has fewer blocks than its context needs"
        )

        # Rows of a group: those of the runs below that split from it, and of its own leaf.
        group_of = np.full(len(forest.leaf), -1, np.int64)
        group_of[ends] = np.arange(len(ends))
        split = np.flatnonzero(choice.split)
        own = ends[forest.leaf[ends] >= 0]
        segments = np.concatenate((split, own))
        group = np.concatenate((group_of[forest.parent[split]], group_of[own]))
        order = np.argsort(group, kind="stable")
        segments, group = segments[order], group[order]
        count = forest.num_rows[segments]
        return _Runs(
            blocks=np.array(blocks, np.int32),
            block_begin=block_begin,
            block_end=block_end,
            start=start,
            length=length,
            rows=forest.rows[ranges(forest.row_begin[segments], count)],
            row_count=np.bincount(group, weights=count, minlength=len(ends)).astype(np.int64),
            leaf=forest.leaf[ends],
        )

    def _split(self, runs: _Runs, positions: Int64) -> tuple[AttentionPlan, Int64]:
        """Split long runs along KV, order the merge; the plan and each run's last group."""
        pieces, piece_len = self._pieces(runs.start, runs.length, runs.row_count)
        last_group = np.cumsum(pieces) - 1
        run = np.repeat(np.arange(len(pieces)), pieces)
        offset = (np.arange(len(run)) - (last_group - pieces + 1)[run]) * piece_len[run]
        start = runs.start[run] + offset
        length = np.minimum(runs.length[run] - offset, piece_len[run])
        block_offsets = np.append(
            runs.block_begin[run] + offset // self._block_size, len(runs.blocks)
        )

        count = runs.row_count[run]
        rows_begin = np.cumsum(runs.row_count) - runs.row_count
        rows = runs.rows[ranges(rows_begin[run], count)]
        group = np.repeat(np.arange(len(run)), count)
        # A row that comes before a piece sees nothing of it: no partial for it there.
        sees = positions[rows] >= start[group]
        if not sees.all():
            rows, group = rows[sees], group[sees]
            count = np.bincount(group, minlength=len(run))
        row_offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(count)))
        assert (count > 0).all(), "a group without rows"
        causal = np.zeros(len(run), np.int32)
        causal[group[positions[rows] < (start + length - 1)[group]]] = 1

        # Groups stand upper levels first, so slots of a row in rising order go root to leaf.
        partials = np.argsort(rows, kind="stable")
        partial_count = np.bincount(rows, minlength=len(positions))
        partials[np.repeat(partial_count == 1, partial_count)] = -1
        plan = AttentionPlan(
            block_size=self._block_size,
            query_positions=_int32(positions),
            group_blocks=runs.blocks,
            group_block_offsets=_int32(block_offsets),
            group_start=_int32(start),
            group_len=_int32(length),
            group_rows=_int32(rows),
            group_row_offsets=_int32(row_offsets),
            group_causal=causal,
            row_partials=_int32(partials),
            row_partial_offsets=_int32(
                np.concatenate((np.zeros(1, np.int64), np.cumsum(partial_count)))
            ),
            chunk_tokens=self._chunk_tokens,
        )
        return plan, last_group

    def _pieces(self, start: Int64, length: Int64, row_count: Int64) -> tuple[Int64, Int64]:
        """How many pieces each run is split into, and the tokens of a piece (whole blocks).

        A piece costs each of its rows a partial, so a run is never split so far that partials
        outweigh the KV they belong to; chunked prefill, with its many rows, stays whole.
        """
        costs, block_size = self._costs, self._block_size
        limit = costs.max_group_tokens
        if costs.parallel_groups:
            balanced = -(-int(length.sum()) // costs.parallel_groups)
            balanced = max(balanced, costs.min_group_tokens)
            limit = balanced if limit is None else min(limit, balanced)
        if self._chunk_tokens:
            return self._chunks(start, length, row_count, limit)
        if limit is None or (len(length) and int(length.max()) <= limit):
            return np.ones(len(length), np.int64), np.maximum(length, 1)
        fair = -(-row_count * costs.partial_bytes_per_row // costs.kv_bytes_per_token)
        pieces = np.maximum(-(-length // np.maximum(fair, limit)), 1)
        piece_len = -(-length // (pieces * block_size)) * block_size
        piece_len = np.maximum(piece_len, 1)
        return np.maximum(-(-length // piece_len), 1), piece_len

    def _chunks(
        self, start: Int64, length: Int64, row_count: Int64, limit: int | None
    ) -> tuple[Int64, Int64]:
        """`_pieces` of a deterministic plan: chunks, but for runs from 0 that need no split."""
        costs, chunk = self._costs, self._chunk_tokens
        cut = start > 0
        if limit is not None:
            pays = row_count * costs.partial_bytes_per_row <= chunk * costs.kv_bytes_per_token
            cut |= (length > limit) & pays
        pieces = np.where(cut, np.maximum(-(-length // chunk), 1), 1)
        return pieces, np.where(cut, chunk, np.maximum(length, 1))

    def _remember(
        self, plan: AttentionPlan, runs: _Runs, last_group: Int64, num_leaves: int
    ) -> _Growth | None:
        own = np.flatnonzero(runs.leaf >= 0)
        if len(own) < num_leaves:
            return None  # a leaf without a group of its own has nowhere to grow
        leaf = runs.leaf[own]
        leaf_group = np.empty(num_leaves, np.int64)
        next_entry = np.empty(num_leaves, np.int64)
        leaf_group[leaf] = last_group[own]
        next_entry[leaf] = runs.block_end[own]
        return _Growth(plan, leaf_group, next_entry, next_entry + self._spare_blocks)


def _int32(values: npt.NDArray[np.integer]) -> Int32:
    return values.astype(np.int32)


def _empty_plan(block_size: int, chunk_tokens: int) -> AttentionPlan:
    none, zero = np.zeros(0, np.int32), np.zeros(1, np.int32)
    return AttentionPlan(
        block_size, none, none, zero, none, none, none, zero, none, none, zero, chunk_tokens
    )
