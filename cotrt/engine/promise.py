"""One result that threads, asyncio tasks and trio tasks can wait for.

The engine thread never waits for a loop: it puts events into the inbox of the loop's bridge and
asks the loop, at most once a step, to set them (`call_soon_threadsafe` or `run_sync_soon`). A loop
that was closed in the meantime is ignored.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import anyio
import anyio.lowlevel

_lock = threading.Lock()  # guards the lists of waiters and the bridges' inboxes


class Promise:
    """A value or an error that comes once, and progress on the way to it.

    Attributes:
        done: the value or the error is there.
        value: what `set` was given.
        error: what `fail` was given.
    """

    __slots__ = ("done", "value", "error", "_for_end", "_for_progress")

    def __init__(self) -> None:
        self.done = False
        self.value: Any = None
        self.error: BaseException | None = None
        self._for_end: list[_ThreadWaiter | _TaskWaiter] = []
        self._for_progress: list[_ThreadWaiter | _TaskWaiter] = []

    @property
    def is_watched(self) -> bool:
        """Somebody wants to hear of progress."""
        return bool(self._for_progress)

    def set(self, value: Any) -> None:
        if not self.done:
            self.value = value
            self.done = True

    def fail(self, error: BaseException) -> None:
        if not self.done:
            self.error = error
            self.done = True

    def wait(
        self, ready: Callable[[], bool], timeout: float | None = None, progress: bool = False
    ) -> bool:
        """Block this thread until ``ready()``.

        Args:
            progress: wake on progress too, not only at the end.

        Returns:
            False if `timeout` seconds went by first.
        """
        if ready():
            return True
        waiter = _ThreadWaiter()
        self._add(waiter, progress)
        try:
            if timeout is None:
                while not ready():
                    waiter.event.wait()
                    waiter.event.clear()
                return True
            deadline = time.monotonic() + timeout
            while not ready():
                left = deadline - time.monotonic()
                if left <= 0 or not waiter.event.wait(left):
                    return ready()
                waiter.event.clear()
            return True
        finally:
            self._remove(waiter, progress)

    async def wait_async(self, ready: Callable[[], bool], progress: bool = False) -> None:
        """Wait in the running asyncio or trio loop until ``ready()``."""
        if ready():
            await anyio.lowlevel.checkpoint()
            return
        waiter = _TaskWaiter(_current_bridge())
        self._add(waiter, progress)
        try:
            while not ready():
                await waiter.event.wait()
                waiter.event = anyio.Event()
                # Progress between the two lines above is seen by ready() now.
        finally:
            self._remove(waiter, progress)

    def _add(self, waiter: _ThreadWaiter | _TaskWaiter, progress: bool) -> None:
        with _lock:
            (self._for_progress if progress else self._for_end).append(waiter)

    def _remove(self, waiter: _ThreadWaiter | _TaskWaiter, progress: bool) -> None:
        with _lock:
            (self._for_progress if progress else self._for_end).remove(waiter)


def wake(promises: Iterable[Promise]) -> None:
    """Wake everybody who waits for these promises: at their end, or for progress."""
    bridges: set[_Bridge] = set()
    with _lock:
        for promise in promises:
            waiters = promise._for_progress
            if promise.done and promise._for_end:
                waiters = waiters + promise._for_end
            for waiter in waiters:
                if isinstance(waiter, _ThreadWaiter):
                    waiter.event.set()
                elif waiter.bridge.put(waiter):
                    bridges.add(waiter.bridge)
    for bridge in bridges:
        bridge.call_soon()


class _ThreadWaiter:
    __slots__ = ("event",)

    def __init__(self) -> None:
        self.event = threading.Event()


class _TaskWaiter:
    __slots__ = ("bridge", "event")

    def __init__(self, bridge: _Bridge) -> None:
        self.bridge = bridge
        self.event = anyio.Event()


class _Bridge:
    """The way into one running loop: an inbox, and one wake-up for all that is in it."""

    def __init__(self, schedule: Callable[[Callable[[], None]], Any]) -> None:
        self._schedule = schedule
        self._inbox: list[_TaskWaiter] = []

    def put(self, waiter: _TaskWaiter) -> bool:
        """Add to the inbox; True if the loop has to be asked to look. Under `_lock`."""
        self._inbox.append(waiter)
        return len(self._inbox) == 1

    def call_soon(self) -> None:
        try:
            self._schedule(self._deliver)
        except RuntimeError:  # the loop is closed (asyncio), or has finished (trio)
            with _lock:
                self._inbox.clear()

    def _deliver(self) -> None:
        with _lock:
            waiters, self._inbox = self._inbox, []
        for waiter in waiters:
            waiter.event.set()


_bridges = threading.local()


def _current_bridge() -> _Bridge:
    """The bridge of the loop that runs in this thread."""
    loop: Any
    try:
        loop = asyncio.get_running_loop()
        schedule = loop.call_soon_threadsafe
    except RuntimeError:
        trio = sys.modules.get("trio")
        if trio is None:
            raise RuntimeError("await needs a running asyncio or trio loop") from None
        loop = trio.lowlevel.current_trio_token()
        schedule = loop.run_sync_soon
    if getattr(_bridges, "loop", None) is not loop:
        _bridges.loop, _bridges.bridge = loop, _Bridge(schedule)
    bridge: _Bridge = _bridges.bridge
    return bridge


def in_running_loop() -> bool:
    """Whether this thread is inside a running asyncio or trio loop."""
    try:
        asyncio.get_running_loop()
        return True
    except RuntimeError:
        trio = sys.modules.get("trio")
        return trio is not None and bool(trio.lowlevel.in_trio_run())
