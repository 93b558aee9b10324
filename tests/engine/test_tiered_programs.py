"""Random programs whose KV moves to tiers and back, through stores that fail in every way."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from engine_rig import Rig
from hypothesis import strategies as st
from hypothesis.stateful import rule
from run_programs import run_programs
from tree_program import TreeProgram

from cotrt.engine.disk_store import DiskStore
from cotrt.engine.record_stores import TierOptions

NUM_PROGRAMS = int(os.environ.get("COTRT_PROGRAMS", "500")) // 4

numbers = st.integers(0, 1 << 20)


class TieredProgram(TreeProgram):
    """Beside the verbs of `TreeProgram`: records are lost and damaged, and the disk fills up."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="cotrt-test-"))

    def _new_rig(self, ids: list[int], **options: Any) -> Rig:
        record = options["block_size"] * 4
        tiers = [
            TierOptions(host_bytes=1 << 16, always="move"),
            TierOptions(host_bytes=3 * record, always="move"),
            TierOptions(host_bytes=1 << 12),
            TierOptions(disk_bytes=1 << 20, disk_dir=self.folder, always="move"),
            TierOptions(disk_bytes=6 * 4096, disk_dir=self.folder, always="move"),
            TierOptions(
                host_bytes=2 * record, disk_bytes=1 << 20, disk_dir=self.folder, always="move"
            ),
            TierOptions(disk_bytes=1 << 20, disk_dir=self.folder, keep=True, always="move"),
        ][sum(ids) % 7]
        return Rig(tiers=tiers, **options)

    @property
    def disk(self) -> DiskStore | None:
        return self.rig.engine.records.disk

    def _files(self) -> list[Path]:
        if self.disk is None:
            return []
        self.disk.flush(10)
        return sorted(self.disk.folder.glob("*.kv"))

    @rule(pick=numbers, where=numbers)
    def a_record_is_cut(self, pick: int, where: int) -> None:
        files = self._files()
        if files:
            file = files[pick % len(files)]
            file.write_bytes(file.read_bytes()[: where % file.stat().st_size])

    @rule(pick=numbers, where=numbers)
    def a_bit_flips(self, pick: int, where: int) -> None:
        files = self._files()
        if files:
            file = files[pick % len(files)]
            data = bytearray(file.read_bytes())
            data[where % len(data)] ^= 1 << (where % 8)
            file.write_bytes(data)

    @rule(pick=numbers)
    def another_process_removes_a_record(self, pick: int) -> None:
        files = self._files()
        if files:
            files[pick % len(files)].unlink()

    @rule(chance=numbers)
    def the_disk_fills_up(self, chance: int) -> None:
        if self.disk is not None and chance % 5 == 0:
            self.disk._stop_writing(OSError(28, "No space left on device"))

    @rule(pick=numbers)
    def a_host_record_is_gone(self, pick: int) -> None:
        """Between its schedule and its step another record took its place, say."""
        host = self.rig.engine.records.host
        if host is not None and len(host):
            host._slots.move_to_end(list(host._slots)[pick % len(host)], last=False)
            host._give_up_one()

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            if hasattr(self, "rig") and self.rig.engine.records is not None:
                self.rig.engine.records.close()
            shutil.rmtree(self.folder, ignore_errors=True)


def test_programs_whose_kv_moves_go_on_as_from_scratch() -> None:
    run_programs(TieredProgram, NUM_PROGRAMS)
