"""Verbs of random programs whose KV moves to tiers that are slow, full and wrong."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from draws import among, number, verb
from shadows import MAX_LEN, PARAMS, Shadow, picked
from still_stores import StillStores
from work_verbs import WorkVerbs

from cotrt.engine.records.record_file import name_of
from cotrt.engine.records.record_stores import TierOptions
from cotrt.options.sampling import SamplingParams
from cotrt.tree.tiers.record_keys import next_key, root_key

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
        self.damaged: Counter[str] = Counter()  # records, by what was done to them

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
                (drawn) costs say; paced: what moves takes some steps; pace: costs come of this.
        """
        super().make(**settings)
        engine, model = self.rig.engine, self.rig.model
        self.chance.seed(pace)
        self.stores = StillStores(engine, self.chance, is_paced=paced)
        self.rig.after_step = self.stores.progress
        self._is_kept, self._is_paced = tiers == "kept", paced
        record = engine.tree.block_size * model.kv_shape.token_bytes
        options = tier_options(tiers, always, record, self.folder / "tier")
        self._has_tiers = options is not None
        if options is not None:
            engine._make_tiers(options)

    def step(self) -> None:
        inside, progress = self.rig.model.in_flight, self.stores.progress
        if self._is_paced:
            inside.append(progress)
        super().step()
        if progress in inside:  # no step ran
            inside.remove(progress)

    def _files(self, pick: int) -> list[Path]:
        """Records on disk; where there are none, some may be made."""
        disk = self.stores.disk
        if disk is None:
            return []
        self.stores.flush()
        files = sorted(disk.folder.glob("*.kv"))
        if not files:
            self._fill_the_pool(pick)
            self.stores.flush()
            files = sorted(disk.folder.glob("*.kv"))
        return files

    def _fill_the_pool(self, number: int) -> None:
        """Prompts that need all of it, and some steps, so that idle KV goes to a tier."""
        for seed in range(2):
            pick = random.Random(number + seed)
            prompt = [pick.randint(1, 3) for _ in range(min(self.capacity, MAX_LEN) - 2)]
            self.do_submit([prompt], SamplingParams(max_tokens=1))
            for _ in range(6):
                if self.rig.engine.has_work:
                    self.step()

    @verb(6, when=number, pick=number, params=among(*PARAMS))
    def come_back(self, when: int, pick: int, params: SamplingParams) -> None:
        """A branch whose KV has left the pool goes on, as a chat does that was left alone."""

        self.do(when, lambda: self._bring_back(pick, params))

    def _bring_back(self, pick: int, params: SamplingParams) -> None:
        shadow = self._away(pick)
        if shadow is not None:
            self.start(shadow, params)

    def _away(self, pick: int) -> Shadow | None:
        """An idle branch whose KV has left the pool."""
        away = [
            shadow
            for shadow in self.held()
            if shadow.branch is not None
            and shadow.busy is None
            and shadow.branch.kv.location in ("host", "disk")
        ]
        return picked(away, pick, lambda s: s.key) if away else None

    def _records_of(self, shadow: Shadow) -> set[str]:
        """Names of the files that records of its full blocks have, where they are on disk."""
        model, size = self.rig.model, self.rig.tree.block_size
        first, ids = root_key(model.fingerprint, size), shadow.ids
        blocks = [ids[i : i + size] for i in range(0, len(ids) - size + 1, size)]
        return {name_of(key) for key in itertools.accumulate(blocks, next_key, initial=first)}

    @verb(2, pick=number, where=number)
    def a_record_is_cut(self, pick: int, where: int) -> None:
        def cut(file: Path) -> None:
            data = file.read_bytes()
            file.write_bytes(data[: where % max(1, len(data))])

        self._damage_record("cut", pick, cut)

    @verb(2, pick=number, where=number)
    def a_bit_flips(self, pick: int, where: int) -> None:
        def flip(file: Path) -> None:
            data = bytearray(file.read_bytes())
            if data:  # it may be cut already
                data[where % len(data)] ^= 1 << (where % 8)
                file.write_bytes(data)

        self._damage_record("flipped", pick, flip)

    @verb(2, pick=number)
    def another_process_removes_a_record(self, pick: int) -> None:
        self._damage_record("removed", pick, Path.unlink)

    def _damage_record(self, how: str, pick: int, damage: Callable[[Path], None]) -> None:
        """A record on disk is damaged; every other time one of a branch, which then goes on."""
        files = self._files(pick)
        away = self._away(pick) if pick % 2 else None
        if away is not None:
            names = self._records_of(away)
            files = [file for file in files if file.name in names] or files
        if files:
            file = picked(files, pick, lambda path: zlib.crc32(path.name.encode()))
            damage(file)
            self.stores.note_damaged(file)
            self.damaged[how] += 1
            if away is not None:
                self.start(away, PARAMS[pick % len(PARAMS)])

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
        if host is not None and not len(host):
            self._fill_the_pool(pick)
        if host is not None and len(host):
            self.damaged["gone"] += 1
            host._slots.move_to_end(picked(host._slots, pick, zlib.crc32), last=False)
            host._give_up_one()

    def happened(self) -> Counter[str]:
        happened, engine = super().happened(), self.rig.engine
        happened["stored"] = engine.moved.stored_blocks
        happened["loaded"] = engine.moved.loaded_blocks
        happened["failed loads"] = engine.moved.failed_loads
        happened["the disk was full"] = self.stores.num_failed_writes
        happened.update({f"records {how}": n for how, n in self.damaged.items()})
        happened["damaged records read"] = self.stores.num_damaged_read
        happened["large pools with tiers"] = self._has_tiers and engine.tree.pool.num_blocks >= 20
        return happened

    def dispose(self) -> None:
        try:
            if hasattr(self, "stores"):
                self.stores.close()
        finally:
            if self._made is not None:
                shutil.rmtree(self._made, ignore_errors=True)
            super().dispose()
