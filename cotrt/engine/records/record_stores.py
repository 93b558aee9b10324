"""Where records lie below the pool: host memory, disk, sources. What a step stores and loads."""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from cotrt.engine.model import RecordCopy, StepModel, is_asynchronous
from cotrt.engine.records.disk_store import DiskStore
from cotrt.engine.records.host_store import HostStore
from cotrt.engine.records.readahead import Readahead
from cotrt.errors import SavedBranchError
from cotrt.plan import UInt8
from cotrt.tree.tiers.tier_costs import TierCosts
from cotrt.tree.tiers.tiers import Store

logger = logging.getLogger(__name__)

# Records read ahead that wait for their step.
_AHEAD_BYTES = 128 << 20
# Blocks are taken from the device in pieces of at most this size.
_PIECE_BYTES = 64 << 20
# Of a device that runs behind the host, so many pieces are on their way at once.
_PIECES_IN_FLIGHT = 2


@dataclass(frozen=True, slots=True)
class TierOptions:
    """The tiers of an engine.

    Attributes:
        host_bytes: of host memory; 0 for no host tier.
        disk_bytes: of disk; 0 for no disk tier.
        disk_dir: its folder; None for the system's temporary one.
        keep: the folder outlives the engine: a prefix cache.
        always: "move" or "compute" without comparing costs; None to compare.
    """

    host_bytes: int = 0
    disk_bytes: int = 0
    disk_dir: str | os.PathLike[str] | None = None
    keep: bool = False
    always: str | None = None


class RecordSource(Protocol):
    """Read-only records, such as those of a saved branch."""

    def keys(self) -> Mapping[bytes, Any]:
        """A handle for each record, by its key; it does not change."""

    def read(self, handle: Any) -> bytes | bytearray | memoryview | UInt8:
        """The bytes of a record; called in a thread of its own. Raises where they are bad."""

    def close(self) -> None:
        """Nothing is read from it any more."""


class RecordStores:
    """The tiers' storage: the scheduler asks what there is, a step stores and loads.

    Args:
        model: the model whose blocks are moved.
        block_size: tokens a block.
        options: which tiers there are.
        costs: told how long moves take.

    Raises:
        OSError: the folder of the disk tier cannot be made or read.
    """

    def __init__(
        self, model: StepModel, *, block_size: int, options: TierOptions, costs: TierCosts
    ) -> None:
        self._model = model
        self._shape = model.kv_shape
        self._block_size = block_size
        self._record_bytes = block_size * self._shape.token_bytes
        self._costs = costs
        self._sources: list[tuple[RecordSource, Mapping[bytes, Any]]] = []
        self._bad: set[bytes] = set()  # records of sources that could not be read
        self._arrived = threading.Event()
        self.disk: DiskStore | None = None
        self.host: HostStore | None = None
        if options.disk_bytes:
            folder = options.disk_dir
            if folder is None:
                import tempfile

                folder = tempfile.gettempdir()
            self.disk = DiskStore(
                folder,
                options.disk_bytes,
                record_bytes=self._record_bytes,
                keep=options.keep,
                on_written=costs.speed("disk").write.note,
            )
        if options.host_bytes >= self._record_bytes:
            self.host = HostStore(
                options.host_bytes // self._record_bytes,
                self._record_bytes,
                pinned=getattr(getattr(model, "device", None), "type", "cpu") == "cuda",
                spill=None if self.disk is None else self.disk.put,
            )
        self._ahead = Readahead(
            max(_AHEAD_BYTES, 8 * self._record_bytes),
            lambda tier, count, seconds: costs.speed(tier).read.note(count, seconds),
            self.ring,
        )

    # ---- what the policy asks (tree.tiers.tiers.Records) --------------------------------------

    @property
    def has_tails(self) -> bool:
        """A record of fewer tokens than a block may be among them."""
        return (
            bool(self._sources)
            or (self.host is not None and self.host.num_tails > 0)
            or (self.disk is not None and self.disk.has_tails)
        )

    def where(self, key: bytes) -> str | None:
        """The tier that has a record."""
        if self.host is not None and key in self.host:
            return "host"
        if self.disk is not None and key in self.disk:
            return "disk"
        if self._sources and key not in self._bad and self._source_of(key) is not None:
            return "source"
        return None

    def _source_of(self, key: bytes) -> tuple[RecordSource, Any] | None:
        for source, handles in self._sources:
            if key in handles:
                return source, handles[key]
        return None

    def tier_for(self, num_bytes: int) -> str | None:
        """The tier that would take so many bytes now."""
        if self.host is not None:
            return "host"
        if self.disk is not None and self.disk.can_take(num_bytes):
            return "disk"
        return None

    def touch(self, key: bytes) -> None:
        """A record would have been stored again: it was used."""
        if self.host is not None and key in self.host:
            self.host.touch(key)
        elif self.disk is not None:
            self.disk.touch(key)

    def request(self, keys: Sequence[bytes]) -> None:
        """Begin to read records that are not in memory."""
        for key in keys:
            if self.host is not None and key in self.host:
                self.host.touch(key)  # what the step stores first shall not push it out
                continue
            if self.is_ready(key):
                continue
            disk, source = self.disk, self._source_of(key)
            if disk is not None and key in disk:
                self._ahead.request(key, "disk", partial(disk.read, key))
            elif source is not None:
                self._ahead.request(
                    key, "source", partial(_read_source, *source, self._shape.dtype)
                )
            else:  # it is gone: a load learns that at once
                self._ahead.request(key, "disk", lambda: None)

    def is_ready(self, key: bytes) -> bool:
        """A step can load the record, or learn that it is gone, without waiting."""
        return (
            (self.host is not None and key in self.host)
            or self._ahead.is_ready(key)
            or (self.disk is not None and self.disk.is_staged(key))
        )

    # ---- what a step does ---------------------------------------------------------------------

    def store(self, stores: Sequence[Store]) -> Callable[[], None]:
        """Take the first tokens of blocks as records: ``(block, key, tokens)`` each.

        Returns:
            Call it when the step is through: it waits for the records that an asynchronous model
            still brings, and puts them where others find them. Until then nobody does.
        """
        piece = max(1, _PIECE_BYTES // self._record_bytes)
        started: collections.deque[tuple[Sequence[Store], RecordCopy]] = collections.deque()

        def finish(limit: int = 0) -> None:
            while len(started) > limit:
                some, copy = started.popleft()
                self._put(some, copy.wait(), copy.seconds)

        for start in range(0, len(stores), piece):
            some = stores[start : start + piece]
            blocks = [block for block, _, _ in some]
            if is_asynchronous(self._model):
                finish(_PIECES_IN_FLIGHT - 1)
                started.append((some, self._model.start_reading(blocks)))
            else:
                began = time.perf_counter()
                self._put(some, self._model.read_blocks(blocks), time.perf_counter() - began)
        return finish

    def _put(self, stores: Sequence[Store], records: UInt8, seconds: float) -> None:
        """Keep records that are on the host; to bring them there took so long."""
        began = time.perf_counter()
        for (_, key, count), record in zip(stores, records, strict=True):
            if count < self._block_size:
                record = self._shape.cut(record, 0, count)
            if self.host is not None:
                self.host.put(key, count, record)
            elif self.disk is not None:
                self.disk.put(key, count, record)
        if self.host is not None:
            seconds += time.perf_counter() - began
            self._costs.speed("host").write.note(records.size, seconds)

    def note_step(self, num_rows: int, seconds: float) -> None:
        """The model computed so many rows in this time."""
        self._costs.note_step(num_rows, seconds)

    def load(self, loads: Sequence[tuple[bytes, int, int]]) -> set[bytes]:
        """Put records into blocks: ``(key, block, tokens)`` each.

        Returns:
            Keys of those that could not be had; their blocks are as they were.
        """
        began = time.perf_counter()
        failed: set[bytes] = set()
        records = np.empty((len(loads), self._record_bytes), np.uint8)
        blocks: list[int] = []
        for key, block, count in loads:
            record = self._take(key, count * self._shape.token_bytes)
            if record is None:
                failed.add(key)
                if self._sources:
                    self._bad.add(key)
                continue
            records[len(blocks)] = self._shape.pad(record, self._block_size)
            blocks.append(block)
        if blocks:
            self._model.write_blocks(blocks, records[: len(blocks)])
            seconds = time.perf_counter() - began
            moved = len(blocks) * self._record_bytes
            self._costs.taking_in.note(moved, seconds)
            if self.host is not None:
                self._costs.speed("host").read.note(moved, seconds)
        return failed

    def _take(self, key: bytes, num_bytes: int) -> UInt8 | None:
        record = None if self.host is None else self.host.get(key)
        if record is not None:
            assert self.host is not None
            self.host.note_loaded(key)
        elif self._ahead.is_ready(key):
            record = self._ahead.take(key)
        elif self.disk is not None and key in self.disk:  # staged, or written a moment ago
            record = self.disk.read(key)
        return record if record is not None and record.size == num_bytes else None

    def host_copy(self, key: bytes) -> UInt8 | None:
        """A copy of a record in host memory. Under the engine's lock."""
        record = None if self.host is None else self.host.get(key)
        return None if record is None else record.copy()

    def read_now(self, key: bytes) -> UInt8 | None:
        """A record on disk or of a source, read in this thread; None where it cannot be had."""
        try:
            record = None if self.disk is None else self.disk.read(key)
            if record is None:
                source = self._source_of(key)
                record = None if source is None else _read_source(*source, self._shape.dtype)
        except Exception as error:  # of a source: its file is not what it was
            logger.warning("a KV record cannot be read: %s", error)
            return None
        return record

    # ---- waiting ------------------------------------------------------------------------------

    def ring(self) -> None:
        """Wake who waits for records: one has come, or there is other work."""
        self._arrived.set()

    def wait(self, seconds: float) -> None:
        """Until a record has come or somebody rings, for a time at most."""
        self._arrived.wait(seconds)
        self._arrived.clear()

    # ---- sources and the end ------------------------------------------------------------------

    def add_source(self, source: RecordSource) -> None:
        """Records of `source` can be loaded from now on. Under the engine's lock."""
        self._sources.append((source, source.keys()))

    def remove_source(self, source: RecordSource) -> None:
        """They cannot any more; those that are read already still can. It is closed."""
        self._sources = [each for each in self._sources if each[0] is not source]
        source.close()

    @property
    def num_host(self) -> int:
        """Records in host memory."""
        return 0 if self.host is None else len(self.host)

    @property
    def num_disk(self) -> int:
        """Records on disk or on their way."""
        return 0 if self.disk is None else len(self.disk)

    def close(self) -> None:
        """Write what is to be kept, for a time; remove the rest."""
        self._ahead.close()
        for source, _ in self._sources:
            source.close()
        if self.disk is not None:
            with contextlib.suppress(OSError):
                self.disk.close()

    def check_invariants(self) -> None:
        """Raise AssertionError where a store's laws are broken."""
        if self.host is not None:
            self.host.check_invariants()
        if self.disk is not None:
            self.disk.check_invariants()


def _read_source(source: RecordSource, handle: Any, dtype: str) -> UInt8:
    """A source's record.

    Raises:
        SavedBranchError: it is not what it was, or its KV is not finite: one NaN would reach every
            token that comes after.
    """
    record = np.frombuffer(source.read(handle), np.uint8)
    if not _is_finite(record, dtype):
        raise SavedBranchError("the KV in the file is not finite: it is computed again")
    return record


# Bits of a number's exponent, all of which are set where it is not finite.
_EXPONENTS = {
    "bfloat16": ("<u2", 0x7F80),
    "float16": ("<u2", 0x7C00),
    "float32": ("<u4", 0x7F800000),
}


def _is_finite(record: UInt8, dtype: str) -> bool:
    """Whether no number of a record is NaN or infinite."""
    if dtype not in _EXPONENTS:
        return True
    kind, exponent = _EXPONENTS[dtype]
    return not bool(((record.view(kind) & exponent) == exponent).any())
