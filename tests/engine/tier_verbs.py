"""Verbs of random programs whose KV moves to tiers that are slow, full and wrong."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from draws import among, number, verb
from shadows import PARAMS
from still_stores import StillStores
from work_verbs import WorkVerbs

from cotrt.engine.record_stores import TierOptions
from cotrt.params import SamplingParams

# Files of tests need not outlive them: in memory, where there is such a folder.
_FOLDER = next((path for path in ["/dev/shm"] if os.access(path, os.W_OK)), None)

TIERS = ("none", "host", "small host", "disk", "small disk", "both", "kept")


def tier_options(tiers: str, always: str | None, record: int, folder: Path) -> TierOptions | None:
    """The tiers of that name, for records of so many bytes."""
    host, disk, keep = {
        "none": (0, 0, False),
        "host": (1 << 16, 0, False),
        "small host": (3 * record, 0, False),
        "disk": (0, 1 << 20, False),
        "small disk": (0, 6 * 4096, False),
        "both": (2 * record, 1 << 20, False),
        "kept": (0, 1 << 20, True),
    }[tiers]
    if not host and not disk:
        return None
    return TierOptions(host_bytes=host, disk_bytes=disk, disk_dir=folder, keep=keep, always=always)


class TierVerbs(WorkVerbs):
    """Records are lost and damaged; the disk is slow, and fills up."""

    stores: StillStores

    def __init__(self) -> None:
        super().__init__()
        self._made: Path | None = None

    @property
    def folder(self) -> Path:
        """A folder of this program's own."""
        if self._made is None:
            self._made = Path(tempfile.mkdtemp(prefix="cotrt-test-", dir=_FOLDER))
        return self._made

    def make(
        self,
        *,
        tiers: str = "none",
        always: str | None = "move",
        paced: bool = False,
        pace: int = 0,
        **settings: Any,
    ) -> None:
        """Beside the engine, its tiers.

        Args:
            tiers: one of `TIERS`; always: move, or compute, whatever that costs; None: as the
                (drawn) costs say; paced: what moves takes some steps; pace: drawn from this.
        """
        super().make(**settings)
        engine, model = self.rig.engine, self.rig.model
        self.stores = StillStores(engine, pace, is_paced=paced)
        self.rig.after_step = self.stores.progress
        self._is_kept, self._is_paced = tiers == "kept", paced
        record = engine.tree.block_size * model.kv_shape.token_bytes
        options = tier_options(tiers, always, record, self.folder / "tier")
        if options is not None:
            engine._make_tiers(options)

    def step(self) -> None:
        inside, progress = self.rig.model.in_flight, self.stores.progress
        if self._is_paced:
            inside.append(progress)
        super().step()
        if progress in inside:  # no step ran
            inside.remove(progress)

    def _files(self) -> list[Path]:
        disk = self.stores.disk
        if disk is None:
            return []
        self.stores.flush()
        return sorted(disk.folder.glob("*.kv"))

    @verb(6, when=number, pick=number, params=among(*PARAMS))
    def come_back(self, when: int, pick: int, params: SamplingParams) -> None:
        """A branch whose KV has left the pool goes on, as a chat does that was left alone."""

        def act() -> None:
            away = [
                shadow
                for shadow in self.held()
                if shadow.branch is not None
                and shadow.busy is None
                and shadow.branch.kv.location in ("host", "disk")
            ]
            if away:
                self.start(away[pick % len(away)], params)

        self.do(when, act)

    @verb(2, pick=number, where=number)
    def a_record_is_cut(self, pick: int, where: int) -> None:
        files = self._files()
        if files:
            file = files[pick % len(files)]
            data = file.read_bytes()
            file.write_bytes(data[: where % max(1, len(data))])

    @verb(2, pick=number, where=number)
    def a_bit_flips(self, pick: int, where: int) -> None:
        files = self._files()
        if files:
            file = files[pick % len(files)]
            data = bytearray(file.read_bytes())
            if data:  # it may be cut already
                data[where % len(data)] ^= 1 << (where % 8)
                file.write_bytes(data)

    @verb(2, pick=number)
    def another_process_removes_a_record(self, pick: int) -> None:
        files = self._files()
        if files:
            files[pick % len(files)].unlink()

    @verb(0.5)
    def the_folder_is_read_again(self) -> None:
        """As it is now and then where other processes use it too."""
        if self.stores.disk is not None and self._is_kept:
            self.stores.disk._scan()

    @verb(0.5)
    def the_disk_fills_up(self) -> None:
        self.stores.is_full = True

    @verb(1, count=among(3, 10, 30))
    def the_disk_is_slow(self, count: int) -> None:
        self.stores.num_slow += count

    @verb(2, pick=number)
    def a_host_record_is_gone(self, pick: int) -> None:
        """Between its schedule and its step another record took its place, say."""
        host = None if self.rig.engine.records is None else self.rig.engine.records.host
        if host is not None and len(host):
            host._slots.move_to_end(list(host._slots)[pick % len(host)], last=False)
            host._give_up_one()

    def happened(self) -> Counter[str]:
        happened, engine = super().happened(), self.rig.engine
        happened["stored"] = engine.moved.stored_blocks
        happened["loaded"] = engine.moved.loaded_blocks
        happened["failed loads"] = engine.moved.failed_loads
        happened["the disk was full"] = self.stores.num_failed_writes
        return happened

    def dispose(self) -> None:
        try:
            if hasattr(self, "stores"):
                self.stores.close()
        finally:
            if self._made is not None:
                shutil.rmtree(self._made, ignore_errors=True)
            super().dispose()
