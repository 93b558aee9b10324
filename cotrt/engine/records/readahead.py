"""Reads records ahead of the steps that load them, so that no step waits for a disk."""

from __future__ import annotations

import collections
import logging
import threading
import time
import weakref
from collections.abc import Callable

from cotrt.plan import UInt8

logger = logging.getLogger(__name__)

Read = Callable[[], "UInt8 | None"]

_NUM_THREADS = 2


class Readahead:
    """Reads by key in background threads; results wait until they are taken.

    Args:
        max_bytes: results that wait; beyond that those that came first are dropped.
        on_read: called by a reading thread with tier, bytes and seconds of each read.
        on_ready: called by a reading thread when a result is there.
    """

    def __init__(
        self,
        max_bytes: int,
        on_read: Callable[[str, int, float], None],
        on_ready: Callable[[], None],
    ) -> None:
        self._max_bytes = max_bytes
        self._on_read = on_read
        self._on_ready = on_ready
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._asked: collections.OrderedDict[bytes, tuple[str, Read]] = collections.OrderedDict()
        self._reading: set[bytes] = set()
        self._results: collections.OrderedDict[bytes, UInt8 | None] = collections.OrderedDict()
        self._bytes = 0
        self._threads: list[threading.Thread] = []
        self._closed = False

    def request(self, key: bytes, tier: str, read: Read) -> None:
        """Read a record unless it is asked for already. `read` gives None where it cannot."""
        with self._lock:
            if self._closed or key in self._asked or key in self._reading or key in self._results:
                return
            self._asked[key] = (tier, read)
            if len(self._threads) < _NUM_THREADS:
                thread = threading.Thread(
                    target=_read_all, args=(weakref.ref(self),), name="cotrt-read", daemon=True
                )
                self._threads.append(thread)
                thread.start()
            self._work.notify()

    def is_ready(self, key: bytes) -> bool:
        """The read has ended, well or not."""
        return key in self._results

    def take(self, key: bytes) -> UInt8 | None:
        """The record, which is forgotten here; None where it could not be read."""
        with self._lock:
            record = self._results.pop(key, None)
            if record is not None:
                self._bytes -= record.size
            return record

    def _read_some(self) -> bool:
        """Do the read that was asked for first; wait for one, for a time. False at the end."""
        with self._lock:
            if self._closed:
                return False
            if not self._asked:
                self._work.wait(1.0)
                return True
            key, (tier, read) = self._asked.popitem(last=False)
            self._reading.add(key)
        began = time.perf_counter()
        try:
            record = read()
        except Exception as error:  # of a source: its file is not what it was
            logger.warning("a KV record cannot be read, its tokens are computed: %s", error)
            record = None
        if record is not None:
            self._on_read(tier, record.size, time.perf_counter() - began)
        with self._lock:
            self._reading.discard(key)
            self._results[key] = record
            if record is not None:
                self._bytes += record.size
            while self._bytes > self._max_bytes and len(self._results) > 1:
                _, oldest = self._results.popitem(last=False)
                self._bytes -= 0 if oldest is None else oldest.size
        self._on_ready()
        return True

    def close(self) -> None:
        """Forget everything; the threads end."""
        with self._lock:
            self._closed = True
            self._asked.clear()
            self._results.clear()
            self._bytes = 0
            self._work.notify_all()


def _read_all(ref: weakref.ref[Readahead]) -> None:
    while True:
        ahead = ref()
        if ahead is None or not ahead._read_some():
            return
        del ahead
