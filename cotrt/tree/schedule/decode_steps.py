"""Steps that only lengthen the last: each row of a decode step a token further, by arrays alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cotrt.plan import StepPlan
from cotrt.tree.attention.planner import AttentionPlanner
from cotrt.tree.kv_tree import KVTree
from cotrt.tree.schedule.counting import token_hashes
from cotrt.tree.schedule.step import Step
from cotrt.tree.schedule.work import WorkState


class DecodeSteps:
    """The last decode step, and what follows it while nothing changes under the running works.

    A step that is in flight can be lengthened too, before its draws are known.
    """

    def __init__(self, tree: KVTree, planner: AttentionPlanner) -> None:
        self._tree = tree
        self._planner = planner
        self._last: Step | None = None  # all of its works go on, with its `next_ids`
        self._version = -1  # of the tree, when a step was last scheduled afresh

    def note_scheduled(self) -> None:
        """A step was scheduled afresh: it can be lengthened until the tree changes."""
        self._version = self._tree.version

    def forget(self) -> None:
        """The next step is scheduled afresh."""
        self._last = None

    def goes_on(self, step: Step, token_ids: npt.NDArray[np.int32]) -> None:
        """Every draw of the decode step `step` goes on with its token of `token_ids` ``[T]``."""
        step.next_ids = token_ids
        self._last = step

    def next(self) -> Step | None:
        """The step after the last, or None where it has to be scheduled afresh."""
        last, self._last = self._last, None
        if last is None:
            return None
        if self._tree.version == self._version:
            assert last.next_ids is not None
            step = self._lengthen(last, last.next_ids)
            if step is not None:
                return step
        for entry, value in zip(last.entries, last.hashes.tolist(), strict=False):
            seq = entry.work.seq
            if entry.work.state is WorkState.RUNNING and seq.hash_length:
                seq.hash, seq.hash_length = value, seq.num_computed
        return None

    def ahead(self, step: Step) -> Step | None:
        """The step after `step`, which is in flight: the input is what that one draws.

        Its ``input_ids`` are -1 and its hashes missing until `learn` has them.

        Returns:
            None where that step has to wait for the result of `step`.
        """
        if step.num_ahead < 1 or not step.is_decode or self._tree.version != self._version:
            return None
        return self._lengthen(step, None)

    def learn(self, step: Step, before: Step, token_ids: npt.NDArray[np.int32]) -> None:
        """The input of `step`, scheduled ahead, is known: the draws of `before` ``[T]``.

        Call it when `before` is committed and the works that it ended are removed: what `step`
        computes for those is dropped.
        """
        over = [entry.work.state is not WorkState.RUNNING for entry in step.entries]
        if any(over):
            step.dropped = np.array(over)
        step.hashes = _next_hashes(before, step.plan.positions, token_ids)

    def _lengthen(self, last: Step, input_ids: npt.NDArray[np.int32] | None) -> Step | None:
        """Each row of `last` one token further, in a few array operations; None if it cannot.

        Args:
            input_ids: ``[T]``; None where `last` is in flight, and then not committed yet.
        """
        tree, plan, size = self._tree, last.plan, self._tree.block_size
        positions = plan.positions + 1
        slots = plan.slot_mapping + 1
        starts = np.flatnonzero(positions % size == 0)
        if not tree.can_allocate(len(starts)):
            return None
        new_blocks = []
        for row in starts.tolist():
            seq = last.entries[row].work.seq
            assert seq.node.end + len(seq.private) * size == positions[row], (
                "the tail is full, or sealed and gone, before a block begins"
            )
            block = tree.allocate()
            seq.private.append(block)
            slots[row] = block * size
            new_blocks.append((row, block))
        attention = self._planner.advance(new_blocks)
        if attention is None:
            for row, _ in new_blocks:
                tree.trim(last.entries[row].work.seq)
            return None
        if input_ids is None:
            hashes, input_ids = last.hashes[:0], np.full(len(positions), -1, np.int32)
        else:
            hashes = _next_hashes(last, positions, input_ids)
        return Step(
            plan=StepPlan(
                input_ids=input_ids,
                positions=positions,
                slot_mapping=slots,
                copies=(),
                attention=attention,
                logits_rows=plan.logits_rows,
                sample_rows=plan.sample_rows,
                stores=() if tree.tiers is None else tree.tiers.take_stores(),
            ),
            entries=last.entries,
            draws=last.draws,
            is_decode=True,
            serial=last.serial,
            hashes=hashes,
            sampled=np.ones(len(positions), np.bool_),
            num_ahead=max(-1, last.num_ahead - 1),
        )


def _next_hashes(
    last: Step, positions: npt.NDArray[np.int32], ids: npt.NDArray[np.int32]
) -> npt.NDArray[np.uint64]:
    return last.hashes + token_hashes(positions.astype(np.int64), ids.astype(np.int64))
