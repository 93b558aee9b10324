"""Memory tiers without threads or clocks: what is read and written, and when, is the program's.

A disk tier's reads and writes happen between steps, and within them, at a pace that is drawn; what
moving and computing cost is drawn too. So a program that fails fails again.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from unittest import mock

from cotrt.engine import engine as engine_module
from cotrt.engine.engine import Engine
from cotrt.engine.records import record_file
from cotrt.engine.records.disk_store import DiskStore
from cotrt.engine.records.readahead import Readahead
from cotrt.engine.records.record_stores import RecordStores, TierOptions
from cotrt.plan import UInt8
from cotrt.tree.tiers.tier_costs import Mean, TierCosts, TierSpeed

_STEP_SECONDS = 0.01
_MANY = 1 << 20


class _NoThread:
    """Stands where a store keeps its thread, so that it starts none."""

    def join(self, timeout: float | None = None) -> None:
        """There is nothing to wait for."""


class _DrawnMean(Mean):
    """Takes so many seconds for a unit, whatever was measured."""

    def __init__(self, pick: random.Random, least: float, most: float) -> None:
        super().__init__()
        self._draw = lambda: pick.uniform(least, most)

    def note(self, units: float, seconds: float) -> None:
        super().note(units, units * self._draw())


class DrawnCosts(TierCosts):
    """Costs of which now moving and now computing is the smaller one."""

    MIN_ROWS = 4

    def __init__(self, *, always: str | None, pick: random.Random) -> None:
        super().__init__(always=always)
        self._pick = pick
        self.taking_in = _DrawnMean(pick, 1e-6, 1e-3)
        self._prefill = _DrawnMean(pick, 1e-4, 4e-4)

    def speed(self, tier: str) -> TierSpeed:
        if tier not in self._speeds:
            self._speeds[tier] = TierSpeed(
                write=_DrawnMean(self._pick, 0, 1e-4), read=_DrawnMean(self._pick, 0, 1e-4)
            )
        return self._speeds[tier]


class StillStores:
    """The stores of an engine, those that it makes later included, driven by hand.

    Args:
        engine: an engine without tiers so far.
        pick: what paces and costs are drawn from.
        is_paced: reads and writes take some steps; else each is done after the step.

    Attributes:
        num_slow: for so many more steps nothing is read or written.
        is_full: the disk takes no more.
        num_failed_writes: writes that found it full.
        num_damaged_read: reads of records that were noted to be damaged.
    """

    def __init__(self, engine: Engine, pick: random.Random, *, is_paced: bool) -> None:
        self._engine = engine
        self._pick = pick
        self._is_paced = is_paced
        self._now = itertools.count()
        self._make = engine._make_tiers
        self.num_slow = 0
        self.is_full = False
        self.num_failed_writes = 0
        self.num_damaged_read = 0
        self._damaged: set[bytes] = set()
        engine._make_tiers = self.make  # type: ignore[method-assign]

    def make(self, options: TierOptions) -> RecordStores:
        """The engine's tiers, with nothing in them that acts by itself."""

        def costs(*, always: str | None) -> TierCosts:
            return DrawnCosts(always=always, pick=self._pick)

        with mock.patch.object(engine_module, "TierCosts", costs):
            records = self._make(options)
        records._ahead._threads += [_NoThread(), _NoThread()]  # type: ignore[list-item]
        records.wait = self._wait  # type: ignore[method-assign]
        if records.disk is not None:
            records.disk._writer = _NoThread()  # type: ignore[assignment]
            records.disk._scanned = float("inf")
            self._read = records.disk.read
            records.disk.read = self._read_and_note  # type: ignore[method-assign]
        assert self._engine.tree.tiers is not None
        self._engine.tree.tiers.clock = lambda: next(self._now) * _STEP_SECONDS
        return records

    @property
    def disk(self) -> DiskStore | None:
        return None if self._engine.records is None else self._engine.records.disk

    def note_damaged(self, file: Path) -> None:
        """The record in `file` is no longer what was written."""
        key = record_file.key_of(file.name)
        assert key is not None
        self._damaged.add(key)

    def _read_and_note(self, key: bytes) -> UInt8 | None:
        record = self._read(key)
        if record is None and key in self._damaged:
            self._damaged.remove(key)
            self.num_damaged_read += 1
        return record

    def progress(self) -> None:
        """What is read and written after a step, or within one."""
        if self._engine.records is None:
            return
        if self.num_slow:
            self.num_slow -= 1
            return
        count = self._pick.choice([0, 0, 1, 2, 5, _MANY]) if self._is_paced else _MANY
        ahead: Readahead = self._engine.records._ahead
        for _ in range(count):
            if not ahead._asked:
                break
            ahead._read_some()
        for _ in range(count):
            if not self._write_one():
                break

    def _wait(self, seconds: float) -> None:
        """The engine has nothing to do but to wait for a record."""
        next(self._now)
        self.progress()

    def _write_one(self) -> bool:
        """Write what was staged first; False where nothing is."""
        disk = self.disk
        if disk is None or not disk._staged:
            return False
        if not self.is_full:
            disk._write_some()
            return True
        self.num_failed_writes += 1
        full = OSError(28, "No space left on device")
        with mock.patch.object(record_file, "write", side_effect=full):
            disk._write_some()
        return True

    def flush(self) -> None:
        """Write all that is staged."""
        while self._write_one():
            pass

    def close(self) -> None:
        if self._engine.records is not None:
            self.flush()
            self._engine.records.close()
