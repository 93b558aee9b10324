"""The engine's lock, which lets short calls of other threads go first."""

from __future__ import annotations

import threading
import time
from types import TracebackType

from cotrt.engine.interrupts import shield


class EngineLock:
    """A reentrant lock. The engine thread, which takes it twice a step, steps back for others.

    While the main thread holds it, a Ctrl-C waits (see interrupts.py).

    Python's locks are not fair: a thread that releases one and takes it again some microseconds
    later would keep out a waiting thread for many steps.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._num_waiting = 0
        self._count = threading.Lock()

    def __enter__(self) -> EngineLock:
        shield.hold()
        if not self._lock.acquire(blocking=False):
            self._add_waiting(1)
            try:
                self._lock.acquire()
            finally:
                self._add_waiting(-1)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lock.release()
        shield.release()

    def _add_waiting(self, change: int) -> None:
        with self._count:
            self._num_waiting += change

    def acquire_after_others(self) -> None:
        """Acquire, once those who are waiting now have had their turn (for 1 ms at most)."""
        if self._num_waiting:
            deadline = time.perf_counter() + 1e-3
            while self._num_waiting and time.perf_counter() < deadline:
                time.sleep(5e-5)
        self._lock.acquire()

    def release(self) -> None:
        self._lock.release()
