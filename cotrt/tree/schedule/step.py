"""One scheduled step: the plan for the runner, and whose rows are whose."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from cotrt.plan import StepPlan
from cotrt.tree.schedule.work import Work
from cotrt.tree.tiers.tiers import Load


@dataclass(slots=True)
class Entry:
    """Consecutive rows of one work: positions ``start .. start + num_rows - 1``.

    Attributes:
        first_row: index of its first row in the step.
        num_new: rows whose KV is written (all, or all but the first).
    """

    work: Work
    start: int
    num_rows: int
    first_row: int
    num_new: int

    @property
    def end(self) -> int:
        return self.start + self.num_rows


@dataclass(slots=True)
class LoadEntry:
    """The next records of a work's load: their keys, and the tokens of each."""

    work: Work
    load: Load
    keys: list[bytes]
    sizes: list[int]


@dataclass(slots=True)
class Step:
    """A plan and its bookkeeping.

    Attributes:
        entries: rows by work, in row order.
        draws: the work of each draw, in the order of ``plan.sample_rows``.
        scored: ``(work, position)`` of each scored logit, in the order of ``plan.scored_rows``.
        joined: works that take part through another's rows only.
        loads: records by work.
        is_decode: one row and one draw a work, all new; the next step may only lengthen this one.
        serial: equal for steps that only lengthen each other.
        hashes: ``[T]`` path hash after each row; sampled: ``[T]`` whether its token was sampled.
        started: works that were waiting before it was scheduled.
        wanted: ``(work, logits_from)`` from before it was scheduled, where it changed.
        next_ids: ``[T]`` what a decode step drew, row by row, once it is known that all go on.
        num_ahead: how many steps may be scheduled behind this one before its draws are known;
            -1 until somebody says so.
        dropped: ``[T]`` rows that were computed ahead for works that had ended by then; None
            where there are none. Nothing counts them.
    """

    plan: StepPlan
    entries: list[Entry]
    draws: list[Work]
    scored: list[tuple[Work, int]] = field(default_factory=list)
    joined: list[Work] = field(default_factory=list)
    loads: list[LoadEntry] = field(default_factory=list)
    is_decode: bool = False
    serial: int = 0
    hashes: npt.NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))
    sampled: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    next_ids: npt.NDArray[np.int32] | None = None
    started: list[Work] = field(default_factory=list)
    wanted: list[tuple[Work, int]] = field(default_factory=list)
    num_ahead: int = -1
    dropped: npt.NDArray[np.bool_] | None = None

    @property
    def counted(self) -> npt.NDArray[np.bool_]:
        """``[T]`` rows that brought KV which was not there."""
        new = self.plan.slot_mapping >= 0
        return new if self.dropped is None else new & ~self.dropped

    def works(self) -> list[Work]:
        """Every work that something in this step is for, each once."""
        found = dict.fromkeys(entry.work for entry in self.entries)
        found.update(dict.fromkeys(self.joined + self.draws))
        found.update(dict.fromkeys(work for work, _ in self.scored))
        found.update(dict.fromkeys(load.work for load in self.loads))
        return list(found)
