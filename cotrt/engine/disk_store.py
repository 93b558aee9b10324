"""The disk tier: one file a record in a bounded folder, written in the background.

A folder is private to one store (a disk tier: removed at the end) or kept (a prefix cache, which
other processes may use at the same time). Nothing here waits for the disk but the two background
threads: where the disk is slow, records are dropped; where it is full, no more are written.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

from cotrt.engine import record_file
from cotrt.engine.private_folder import PrivateFolder
from cotrt.engine.record_file import HEADER_BYTES, BadRecordError
from cotrt.plan import UInt8

logger = logging.getLogger(__name__)

# A small file takes a page of the disk all the same.
_LEAST_FILE_BYTES = 4096
_STAGING_BYTES = 64 << 20
# What other processes did to a shared folder is looked at this often, in seconds.
_RESCAN_SECONDS = 5.0
# A temporary file of a process that is gone, or older than this, is nobody's.
_STALE_SECONDS = 3600.0
_TEMPORARY = ".cotrt-tmp-"


class DiskStore:
    """Records by key in files.

    Args:
        folder: where they lie; made if it is not there.
        max_bytes: of all files in it, the least recently used are removed beyond that.
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
        # key -> bytes on disk, the least recently used first
        self._files: collections.OrderedDict[bytes, int] = collections.OrderedDict()
        self._used = 0
        self._staged: collections.OrderedDict[bytes, tuple[int, UInt8]] = collections.OrderedDict()
        self._staged_bytes = 0
        self._max_staged = max(8 * record_bytes, min(_STAGING_BYTES, max_bytes // 4))
        self._work = threading.Condition(self._lock)
        self._writer: threading.Thread | None = None
        self._closed = False
        self._scanned = time.monotonic()
        if keep:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._scan()

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
                self._files.move_to_end(key)
                return
            if key in self._staged:
                return
            if not self.can_take(record.size):
                self.num_dropped += 1
                return
            self._staged[key] = (num_tokens, record.copy())
            self._staged_bytes += record.size
            self.has_tails |= record.size < self._record_bytes
            if self._writer is None:
                self._writer = threading.Thread(
                    target=_write_all, args=(weakref.ref(self),), name="cotrt-disk", daemon=True
                )
                self._writer.start()
            self._work.notify_all()

    def touch(self, key: bytes) -> None:
        """The record was used."""
        with self._lock:
            if key in self._files:
                self._files.move_to_end(key)

    def _write_some(self) -> bool:
        """Write what is staged first; wait for it, for a time. False at the end."""
        with self._lock:
            if not self._staged:
                if self._closed:
                    return False
                self._work.wait(1.0)
                return True
            key, (num_tokens, record) = next(iter(self._staged.items()))
            # Another store of this process may write to the same folder.
            temporary = self.folder / f"{_TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}"
        began = time.perf_counter()
        size = 0
        try:
            path = self.folder / record_file.name_of(key)
            size = record_file.write(path, temporary, key, num_tokens, record)
        except OSError as error:
            # Somebody may have taken our temporary file for a dead process's.
            if not (isinstance(error, FileNotFoundError) and self.folder.is_dir()):
                self._stop_writing(error)
        if size:
            self._on_written(record.size, time.perf_counter() - began)
        with self._lock:
            if self._staged.pop(key, None) is not None:
                self._staged_bytes -= record.size
            if size and key not in self._files:
                self._files[key] = max(size, _LEAST_FILE_BYTES)
                self._used += self._files[key]
            self._work.notify_all()
        if self._keep and time.monotonic() - self._scanned > _RESCAN_SECONDS:
            with contextlib.suppress(OSError):
                self._scan()
        self._make_room()
        self.on_room()
        return True

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
                key, size = self._files.popitem(last=False)
                self._used -= size
            path = self.folder / record_file.name_of(key)
            with contextlib.suppress(OSError):
                os.unlink(path)

    def _scan(self) -> None:
        """Take over what is in the folder: other processes write and remove files in it too."""
        self._scanned = time.monotonic()
        found: list[tuple[float, bytes, int]] = []
        now = time.time()
        with os.scandir(self.folder) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    if entry.name.startswith(_TEMPORARY):
                        _remove_stale(entry, now)
                        continue
                    key = record_file.key_of(entry.name)
                    if key is not None and entry.is_file(follow_symlinks=False):
                        stat = entry.stat(follow_symlinks=False)
                        found.append((stat.st_mtime, key, stat.st_size))
        found.sort()
        files = collections.OrderedDict((k, max(n, _LEAST_FILE_BYTES)) for _, k, n in found)
        with self._lock:
            self._files, self._used = files, sum(files.values())
        full = HEADER_BYTES + self._record_bytes
        self.has_tails |= any(size != full for _, _, size in found)

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
        with self._lock:
            if key in self._files:
                self._files.move_to_end(key)
        if self._keep:
            with contextlib.suppress(OSError):
                os.utime(path)
        return record

    def _forget(self, key: bytes) -> None:
        with self._lock:
            self._used -= self._files.pop(key, 0)

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
            assert self._used == sum(self._files.values()), "bytes on disk are miscounted"
            staged = sum(record.size for _, record in self._staged.values())
            assert self._staged_bytes == staged, "staged bytes are miscounted"
            assert staged <= self._max_staged, "more is staged than there is room for"


def _write_all(ref: weakref.ref[DiskStore]) -> None:
    while True:
        store = ref()
        if store is None or not store._write_some():
            return
        del store


def _remove_stale(entry: os.DirEntry[str], now: float) -> None:
    """Remove a temporary file whose process is gone."""
    owner = entry.name[len(_TEMPORARY) :].partition("-")[0]
    if now - entry.stat().st_mtime < _STALE_SECONDS and owner.isdigit() and _is_alive(int(owner)):
        return
    os.unlink(entry.path)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is somebody else's
        return True
    return True
