"""Collects the rows of one step and turns them into a `StepPlan`."""

from __future__ import annotations

import numpy as np

from cotrt.plan import StepPlan
from cotrt.tree.attention.planner import AttentionPlanner, PlanLeaf
from cotrt.tree.kv_tree import KVTree
from cotrt.tree.node import Node
from cotrt.tree.schedule.counting import path_hash, token_hashes
from cotrt.tree.schedule.step import Entry, LoadEntry, Step
from cotrt.tree.schedule.work import Work


class StepBuilder:
    """Rows, draws and scored logits of one step, within its budgets.

    Args:
        max_tokens: rows a step.
        max_scored_rows: scored logits rows a step.
    """

    def __init__(self, tree: KVTree, max_tokens: int, max_scored_rows: int) -> None:
        self._tree = tree
        self.tokens_left = max_tokens
        self._scored_left = max_scored_rows
        self.entries: list[Entry] = []
        self.by_work: dict[Work, Entry] = {}
        self.by_node: dict[Node, list[Entry]] = {}  # by the node in which their sequences end
        self.joined: list[Work] = []
        self.started: list[Work] = []
        self.loads: list[LoadEntry] = []
        tiers = tree.tiers
        self.load_bytes_left = 0 if tiers is None else tiers.step_bytes()
        self._num_rows = 0
        self._load_pairs: list[tuple[bytes, int, int]] = []
        self._logits_rows: dict[int, int] = {}  # row -> index among the logits rows
        self._draws: list[tuple[Work, int]] = []
        self._scored: list[tuple[Work, int, int]] = []
        self._wanted: dict[Work, int] = {}

    def rows_for(self, work: Work, limit: int | None = None) -> int:
        """Rows that `work` can have in this step, at most `limit`: 0 when a budget is used up."""
        first = work.first_wanted
        start = min(work.seq.num_computed, first)
        rows = min(work.target - start, self.tokens_left)
        if limit is not None:
            rows = min(rows, limit)
        num_scored = start + rows - first - (1 if work.samples else 0)
        scored_left = max(self._scored_left, 0)  # followers of shared rows may overdraw it
        if num_scored > scored_left:
            rows -= num_scored - scored_left
        return max(rows, 0)

    def blocks_for(self, work: Work, rows: int) -> int:
        """Blocks that these rows would take from the pool."""
        seq = work.seq
        num_new = min(seq.num_computed, work.first_wanted) + rows - seq.num_computed
        return self._tree.blocks_needed(seq, num_new) if num_new else 0

    def add(self, work: Work, rows: int) -> None:
        """Schedule `rows` of `work`; the blocks are known to be there."""
        seq = work.seq
        start = min(seq.num_computed, work.first_wanted)
        end = start + rows
        num_new = end - seq.num_computed
        if num_new:
            self._tree.reserve(seq, num_new)
        entry = Entry(work, start, rows, self._num_rows, num_new)
        self.entries.append(entry)
        self.by_work[work] = entry
        self.by_node.setdefault(seq.node, []).append(entry)
        self._num_rows += rows
        self.tokens_left -= rows
        self._take(work, entry, end)

    def add_load(self, work: Work, num_records: int) -> None:
        """Schedule the next `num_records` of ``work.load``; the blocks are known to be there."""
        seq, load, tree = work.seq, work.load, self._tree
        assert load is not None and load.start == seq.node.end and tree.tiers is not None
        tree.truncate_tip(seq, seq.node.end)  # the first record has what the tail holds, and more
        taken = slice(load.at, load.at + num_records)
        entry = LoadEntry(work, load, load.keys[taken], load.sizes[taken])
        for key, size in zip(entry.keys, entry.sizes, strict=True):
            block = tree.allocate()
            seq.private.append(block)
            self._load_pairs.append((key, block, size))
            self.load_bytes_left -= size * tree.tiers.token_bytes
        self.loads.append(entry)
        # Others can follow it: it goes on to compute what it does not find.
        rows = Entry(work, seq.num_computed, 0, self._num_rows, 0)
        self.by_work[work] = rows
        self.by_node.setdefault(seq.node, []).append(rows)

    def take_logits(self, work: Work, entry: Entry) -> bool:
        """Logits that `work` wants and `entry`, of another work with the same path, has.

        Returns:
            True if nothing more has to be computed for `work` in this step.
        """
        if self._take(work, entry, min(entry.end, work.wait_until)):
            self.joined.append(work)
            return True
        return False

    def _take(self, work: Work, entry: Entry, end: int) -> bool:
        """Draw or score from the rows of `entry` before position `end`; True if all is taken."""
        target = work.target
        if work.first_wanted < end:
            self._wanted.setdefault(work, work.logits_from)
        for position in range(work.first_wanted, end):
            if position < entry.start:
                return False
            row = entry.first_row + position - entry.start
            index = self._logits_rows.setdefault(row, len(self._logits_rows))
            if work.samples and position == target - 1:
                self._draws.append((work, index))
                work.logits_from = work.NO_SCORES
                return True
            self._scored.append((work, position, index))
            self._scored_left -= 1
            work.logits_from = position + 1
        return work.is_satisfied

    def build(self, planner: AttentionPlanner, serial: int) -> Step:
        """The step, with its attention plan."""
        size = self._tree.block_size
        ids: list[int] = []
        sampled: list[bytes] = []
        positions = np.empty(self._num_rows, np.int64)
        slots = np.empty(self._num_rows, np.int64)
        base = np.empty(len(self.entries), np.uint64)
        leaves = []
        for i, entry in enumerate(self.entries):
            seq, row = entry.work.seq, entry.first_row
            ids += seq.span.slice_ids(entry.start, entry.end)
            sampled.append(seq.span.slice_sampled(entry.start, entry.end))
            positions[row : row + entry.num_rows] = range(entry.start, entry.end)
            if entry.num_rows == entry.num_new == 1:
                index = entry.start - seq.node.end
                slots[row] = seq.private[index // size] * size + index % size
            else:
                slots[row : row + entry.num_rows] = self._slots(entry)
            if seq.hash_length != seq.num_computed:
                seq.hash, seq.hash_length = path_hash(seq, seq.num_computed), seq.num_computed
            base[i] = seq.hash
            leaves.append(PlanLeaf(seq.node, seq.private, entry.end, entry.num_rows))
        input_ids = np.array(ids, np.int32)
        logits_rows = np.fromiter(self._logits_rows, np.int32, len(self._logits_rows))
        draws = [work for work, _ in self._draws]
        tiers = self._tree.tiers
        sample_rows = np.array([index for _, index in self._draws], np.int32)
        plan = StepPlan(
            input_ids=input_ids,
            positions=positions.astype(np.int32),
            slot_mapping=slots,
            copies=tuple((source, target) for target, source in self._tree.uncopied.items()),
            attention=planner.plan(leaves),
            logits_rows=logits_rows,
            sample_rows=sample_rows,
            scored_rows=np.array([index for _, _, index in self._scored], np.int32),
            scored_tokens=np.array(
                [work.seq.ids(p + 1, p + 2)[0] for work, p, _ in self._scored], np.int32
            ),
            stores=() if tiers is None else tiers.take_stores(is_idle=not self.entries),
            loads=tuple(self._load_pairs),
        )
        self._tree.uncopied = {}
        is_decode = (
            0 < len(draws) == len(self.entries) == self._num_rows == len(logits_rows)
            and not self._scored
            and not self.loads
            and bool((slots >= 0).all())
        )
        return Step(
            plan=plan,
            entries=self.entries,
            draws=draws,
            scored=[(work, position) for work, position, _ in self._scored],
            joined=self.joined,
            started=self.started,
            wanted=list(self._wanted.items()),
            loads=self.loads,
            is_decode=is_decode,
            serial=serial,
            hashes=self._hashes(base, positions, input_ids, slots >= 0),
            sampled=np.frombuffer(bytearray().join(sampled), np.bool_),
        )

    def _slots(self, entry: Entry) -> np.ndarray:
        """KV slots of an entry's rows; -1 for a first row whose KV is there already."""
        seq, size = entry.work.seq, self._tree.block_size
        index = np.arange(entry.start, entry.end) - seq.node.end
        old = entry.num_rows - entry.num_new
        slots = np.full(entry.num_rows, -1, np.int64)
        blocks = np.array(seq.private or [-1], np.int64)
        slots[old:] = blocks[index[old:] // size] * size + index[old:] % size
        return slots

    def _hashes(
        self, base: np.ndarray, positions: np.ndarray, ids: np.ndarray, new: np.ndarray
    ) -> np.ndarray:
        """``[T]`` path hash after each new row: its entry's base plus the words up to it."""
        if not self.entries:
            return base
        words = np.where(new, token_hashes(positions, ids.astype(np.int64)), np.uint64(0))
        total = np.cumsum(words, dtype=np.uint64)
        first = np.array([entry.first_row for entry in self.entries])
        counts = np.array([entry.num_rows for entry in self.entries])
        before = total[first] - words[first]
        return np.asarray(total + np.repeat(base - before, counts))
