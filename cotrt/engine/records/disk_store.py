"""The disk tier: one file a record in a bounded folder, written in the background.

A folder is private to one store (a disk tier: removed at the end) or kept (a prefix cache, which
other processes may use at the same time). Nothing here waits for the disk but the two background
threads: where the disk is slow, records are dropped; where it is full, no more are written.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import logging
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cotrt.engine.records import record_file, record_folder
from cotrt.engine.records.private_folder import PrivateFolder
from cotrt.engine.records.record_file import HEADER_BYTES, BadRecordError
from cotrt.plan import UInt8

logger = logging.getLogger(__name__)

# A small file takes a page of the disk all the same.
_LEAST_FILE_BYTES = 4096
_STAGING_BYTES = 64 << 20
# What other processes did to a shared folder is looked at this often, in seconds.
_RESCAN_SECONDS = 5.0
# A file's time says when its record was used to within so many seconds; at the end it says it
# exactly. So many files at most get their time between two writes.
_USE_SECONDS = 60.0
_NUM_USES = 64


@dataclass(slots=True)
class _File:
    """A record's file.

    Attributes:
        size: bytes on disk; used: when the record was used last, in seconds since the epoch.
        told: the use that the file's own time says.
    """

    size: int
    used: float
    told: float


class DiskStore:
    """Records by key in files.

    Args:
        folder: where they lie; made if it is not there.
        max_bytes: of all files in it, the least recently used are removed beyond that, by the
            writer thread, from the start on.
        record_bytes: of a record of a whole block.
        keep: leave the files at the end, and use those that are there.
        on_written: called by the writer thread with bytes and seconds of each write.

    Attributes:
        folder: where the files lie (`folder` itself, or a private one inside).
        stopped: why nothing is written any more, or None.
        num_dropped: records that were not kept because the disk could not follow.
        has_tails: a record of fewer tokens than a block has been among them.
        on_room: called by the writer thread when it has written a record.

    Raises:
        OSError: the folder cannot be made or read.

    Laws: bytes in use are those of the files named; what is staged keeps within its bound.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        max_bytes: int,
        *,
        record_bytes: int,
        keep: bool,
        on_written: Callable[[int, float], None] = lambda count, seconds: None,
    ) -> None:
        self._private = None if keep else PrivateFolder(Path(folder))
        self.folder = Path(folder) if self._private is None else self._private.path
        self._keep = keep
        self._max_bytes = max_bytes
        self._record_bytes = record_bytes
        self._on_written = on_written
        self.stopped: str | None = None
        self.num_dropped = 0
        self.has_tails = False
        self.on_room: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        # the least recently used first
        self._files: collections.OrderedDict[bytes, _File] = collections.OrderedDict()
        self._used = 0
        self._untold: dict[bytes, None] = {}  # used a while after what their files' times say
        self._staged: collections.OrderedDict[bytes, tuple[int, UInt8]] = collections.OrderedDict()
        self._staged_bytes = 0
        self._max_staged = max(8 * record_bytes, min(_STAGING_BYTES, max_bytes // 4))
        self._work = threading.Condition(self._lock)
        self._writer: threading.Thread | None = None
        self._closed = False
        self._scanned = time.monotonic()
        self._has_written = False  # since the folder was looked at
        if keep:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if count := record_folder.remove_old(self.folder):
                logger.warning(
                    "%s: removed %d records of an older version: their keys did not cover every "
                    "weight of the model",
                    self.folder,
                    count,
                )
            self._scan()
            if self._used > max_bytes:
                self._start()

    # ---- what there is ------------------------------------------------------------------------

    def __contains__(self, key: bytes) -> bool:
        return key in self._staged or key in self._files

    def __len__(self) -> int:
        with self._lock:
            return len(self._files.keys() | self._staged.keys())

    def is_staged(self, key: bytes) -> bool:
        """The record is still in memory: reading it takes no time."""
        return key in self._staged

    def can_take(self, num_bytes: int) -> bool:
        """Room in memory for so many bytes to be written."""
        return (
            self.stopped is None
            and not self._closed
            and self._staged_bytes + num_bytes <= self._max_staged
            and num_bytes <= self._max_bytes
        )

    # ---- writing ------------------------------------------------------------------------------

    def put(self, key: bytes, num_tokens: int, record: UInt8) -> None:
        """Take a copy of a record, to be written soon; dropped where there is no room for it."""
        with self._lock:
            if key in self._files:
                self._note_use(key)
                return
            if key in self._staged:
                return
            if not self.can_take(record.size):
                self.num_dropped += 1
                return
            self._staged[key] = (num_tokens, record.copy())
            self._staged_bytes += record.size
            self.has_tails |= record.size < self._record_bytes
            self._start()
            self._work.notify_all()

    def touch(self, key: bytes) -> None:
        """The record was used."""
        with self._lock:
            self._note_use(key)

    def _note_use(self, key: bytes) -> None:
        """The caller holds the lock. The writer thread tells others, by the file's time."""
        file = self._files.get(key)
        if file is None:
            return
        self._files.move_to_end(key)
        file.used = time.time()
        if self._keep and not self._closed:
            if file.used - file.told > _USE_SECONDS:
                self._untold[key] = None
            self._start()

    def _start(self) -> None:
        if self._writer is None:
            self._writer = threading.Thread(
                target=_write_all, args=(weakref.ref(self),), name="cotrt-disk", daemon=True
            )
            self._writer.start()

    def _write_some(self) -> bool:
        """Write what is staged first; wait for it, for a time. False at the end."""
        with self._lock:
            if not self._staged and not self._closed:
                self._work.wait(1.0)
            first = next(iter(self._staged.items()), None)
            is_over = self._closed and first is None
        if first is not None:
            key, (num_tokens, record) = first
            self._write(key, num_tokens, record)
        if self._keep:
            self._look_again(now=is_over)
            self._tell_uses(exactly=is_over)
        self._make_room()
        if first is not None:
            self.on_room()
        return not is_over

    def _write(self, key: bytes, num_tokens: int, record: UInt8) -> None:
        # Another store of this process may write to the same folder.
        name = f"{record_folder.TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}"
        began = time.perf_counter()
        size = 0
        try:
            path = self.folder / record_file.name_of(key)
            size = record_file.write(path, self.folder / name, key, num_tokens, record)
        except OSError as error:
            # Somebody may have taken our temporary file for a dead process's.
            if not (isinstance(error, FileNotFoundError) and self.folder.is_dir()):
                self._stop_writing(error)
        if size:
            self._has_written = True
            self._on_written(record.size, time.perf_counter() - began)
        with self._lock:
            if self._staged.pop(key, None) is not None:
                self._staged_bytes -= record.size
            if size and key not in self._files:
                now = time.time()
                self._files[key] = _File(max(size, _LEAST_FILE_BYTES), now, now)
                self._used += self._files[key].size
            self._work.notify_all()

    def _stop_writing(self, error: OSError) -> None:
        with self._lock:
            if self.stopped is None:
                self.stopped = str(error)
                logger.warning(
                    "no more KV is written to %s: %s; what is there stays in use, other KV that "
                    "does not fit is computed again",
                    self.folder,
                    error,
                )
            self._staged.clear()
            self._staged_bytes = 0

    def _make_room(self) -> None:
        """Remove the least recently used files until the bound holds."""
        while True:
            with self._lock:
                if self._used <= self._max_bytes or not self._files:
                    return
                key, file = self._files.popitem(last=False)
                self._used -= file.size
            path = self.folder / record_file.name_of(key)
            with contextlib.suppress(OSError):
                os.unlink(path)

    def _tell_uses(self, *, exactly: bool) -> None:
        """Give files the times of their records' uses, for other processes and the next."""
        with self._lock:
            if exactly:
                keys = [key for key, file in self._files.items() if file.used > file.told]
            else:
                keys = list(itertools.islice(self._untold, _NUM_USES))
            uses: list[tuple[bytes, float]] = []
            for key in keys:
                self._untold.pop(key, None)
                file = self._files.get(key)
                if file is not None:
                    file.told = file.used
                    uses.append((key, file.used))
        for key, used in uses:
            with contextlib.suppress(OSError):
                os.utime(self.folder / record_file.name_of(key), (used, used))

    def _look_again(self, *, now: bool) -> None:
        """Scan a folder that we have written to, now and then, and at the end."""
        if self._has_written and (now or time.monotonic() - self._scanned > _RESCAN_SECONDS):
            with contextlib.suppress(OSError):
                self._scan()

    def _scan(self) -> None:
        """Take over what is in the folder: other processes write, use and remove files in it."""
        self._scanned, self._has_written = time.monotonic(), False
        began = time.time()
        files: list[tuple[bytes, _File]] = []
        full = HEADER_BYTES + self._record_bytes
        for key, size, told in record_folder.look(self.folder):
            known = self._files.get(key)
            used = told if known is None else max(told, known.used)
            files.append((key, _File(max(size, _LEAST_FILE_BYTES), used, told)))
            self.has_tails |= size != full
        files.sort(key=lambda item: (item[1].used, item[0]))
        found = collections.OrderedDict(files)
        with self._lock:
            recent = list(
                itertools.takewhile(lambda i: i[1].used >= began, reversed(self._files.items()))
            )
            for key, file in reversed(recent):  # used while we looked
                if key in found:
                    found[key].used = file.used
                    found.move_to_end(key)
            self._files, self._used = found, sum(file.size for file in found.values())

    # ---- reading ------------------------------------------------------------------------------

    def read(self, key: bytes) -> UInt8 | None:
        """The record, or None: it is gone, or it was bad and is removed, with a log line."""
        staged = self._staged.get(key)
        if staged is not None:
            return staged[1]
        path = self.folder / record_file.name_of(key)
        try:
            record = record_file.read(path, key, self._record_bytes)
        except FileNotFoundError:  # another process removed it
            self._forget(key)
            return None
        except (BadRecordError, OSError) as error:
            logger.warning("the KV record %s is dropped: %s", path, error)
            self._forget(key)
            with contextlib.suppress(OSError):
                os.unlink(path)
            return None
        self.touch(key)
        return record

    def _forget(self, key: bytes) -> None:
        with self._lock:
            file = self._files.pop(key, None)
            if file is not None:
                self._used -= file.size

    # ---- the end ------------------------------------------------------------------------------

    def flush(self, seconds: float) -> bool:
        """Wait until all that is staged is written, for a time; whether it is."""
        deadline = time.monotonic() + seconds
        with self._lock:
            while self._staged and self.stopped is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._work.wait(left)
        return True

    def close(self, seconds: float = 1.0) -> None:
        """Write what is staged, for a time, where it is to be kept; remove the folder where not."""
        if self._closed:
            return
        if self._keep:
            self.flush(seconds)
        with self._lock:
            self._closed = True
            self._staged.clear()
            self._staged_bytes = 0
            self._work.notify_all()
        if self._writer is not None and self._writer is not threading.current_thread():
            self._writer.join(seconds)
        if self._private is not None:
            self._private.remove()

    def check_invariants(self) -> None:
        """Raise AssertionError unless the sums are those of what can be named."""
        with self._lock:
            sizes = sum(file.size for file in self._files.values())
            assert self._used == sizes, "bytes on disk are miscounted"
            staged = sum(record.size for _, record in self._staged.values())
            assert self._staged_bytes == staged, "staged bytes are miscounted"
            assert staged <= self._max_staged, "more is staged than there is room for"


def _write_all(ref: weakref.ref[DiskStore]) -> None:
    store = ref()
    if store is not None:
        store._make_room()
    while store is not None and store._write_some():
        del store
        store = ref()
