"""One result that threads, asyncio tasks and trio tasks can wait for.

The engine thread never waits for a loop: it puts waiters into the inbox of their loop's bridge and
asks the loop, once until it has looked, to wake them (`call_soon_threadsafe` or `run_sync_soon`).
A loop that was closed in the meantime is ignored.

Nothing here takes a lock that other code could be interrupted in: a coroutine that the garbage
collector closes, or a Ctrl-C between two bytecodes, must not leave one taken. Single operations of
lists, deques and bare locks are atomic; the order of the lines does the rest.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import anyio
import anyio.lowlevel


class Promise:
    """A value or an error that comes once, and progress on the way to it.

    Attributes:
        done: the value or the error is there.
        value: what `set` was given.
        error: what `fail` was given.
    """

    __slots__ = ("_for_end", "_for_progress", "done", "error", "value")

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
        deadline = None if timeout is None else time.monotonic() + timeout
        waiter = _ThreadWaiter()
        waiters = self._for_progress if progress else self._for_end
        waiters.append(waiter)
        try:
            while not ready():
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return False
                waiter.sleep(left)
            return True
        finally:
            waiters.remove(waiter)

    async def wait_async(self, ready: Callable[[], bool], progress: bool = False) -> None:
        """Wait in the running asyncio or trio loop until ``ready()``; always a checkpoint."""
        if ready():
            await anyio.lowlevel.checkpoint()
            return
        waiter = _TaskWaiter(_current_bridge())
        waiters = self._for_progress if progress else self._for_end
        waiters.append(waiter)
        try:
            while not ready():
                await waiter.event.wait()
                waiter.event = anyio.Event()
                # Progress between the two lines above is seen by ready() now.
        finally:
            waiters.remove(waiter)


def wake(promises: Iterable[Promise]) -> None:
    """Wake everybody who waits for these promises: at their end, or for progress."""
    bridges: set[_Bridge] = set()
    for promise in promises:
        waiters = tuple(promise._for_progress)
        if promise.done:
            waiters += tuple(promise._for_end)
        for waiter in waiters:
            if isinstance(waiter, _ThreadWaiter):
                waiter.wake()
            else:
                waiter.bridge.put(waiter)
                bridges.add(waiter.bridge)
    for bridge in bridges:
        bridge.ring()


class _ThreadWaiter:
    """A thread that sleeps; a bare lock, which a Ctrl-C cannot leave half taken."""

    __slots__ = ("_asleep",)

    def __init__(self) -> None:
        self._asleep = threading.Lock()
        self._asleep.acquire()

    def sleep(self, timeout: float | None) -> None:
        """Until the next `wake` since the last sleep, or for `timeout` seconds."""
        if timeout is None:
            self._asleep.acquire()
        else:
            self._asleep.acquire(timeout=min(timeout, threading.TIMEOUT_MAX))

    def wake(self) -> None:
        # RuntimeError: it has been woken already and has not slept since.
        with contextlib.suppress(RuntimeError):
            self._asleep.release()


class _TaskWaiter:
    __slots__ = ("bridge", "event", "is_queued")

    def __init__(self, bridge: _Bridge) -> None:
        self.bridge = bridge
        self.event = anyio.Event()
        self.is_queued = False


class _Bridge:
    """The way into one running loop: an inbox, and one wake-up for all that is in it."""

    def __init__(self, schedule: Callable[[Callable[[], None]], Any]) -> None:
        self._schedule = schedule
        self._inbox: collections.deque[_TaskWaiter] = collections.deque()
        self._is_rung = False
        self._is_closed = False

    def put(self, waiter: _TaskWaiter) -> None:
        """Add to the inbox; `ring` makes the loop look."""
        if not waiter.is_queued and not self._is_closed:
            waiter.is_queued = True
            self._inbox.append(waiter)

    def ring(self) -> None:
        """Ask the loop to look into the inbox, if it is not on its way already."""
        if self._is_rung or self._is_closed:
            return
        self._is_rung = True
        try:
            self._schedule(self._deliver)
        except RuntimeError:  # the loop is closed (asyncio), or has finished (trio)
            self._is_closed = True
            self._inbox.clear()

    def _deliver(self) -> None:
        # In this order: what is put from here on either is seen below or rings again.
        self._is_rung = False
        for _ in range(len(self._inbox)):
            waiter = self._inbox.popleft()
            waiter.is_queued = False
            waiter.event.set()
        if self._inbox:
            self.ring()


_bridges = threading.local()


def _current_bridge() -> _Bridge:
    """The bridge of the loop that runs in this thread."""
    loop: Any
    if _trio_says("in_trio_task"):
        loop = sys.modules["trio"].lowlevel.current_trio_token()
        schedule = loop.run_sync_soon
    else:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise RuntimeError("await needs a running asyncio or trio loop") from None
        schedule = loop.call_soon_threadsafe
    if getattr(_bridges, "loop", None) is not loop:
        _bridges.loop, _bridges.bridge = loop, _Bridge(schedule)
    bridge: _Bridge = _bridges.bridge
    return bridge


def sleep_at_exit(error: BaseException) -> None:
    """If `error` says that the program is ending, sleep, in any thread but the main one.

    What is left then are daemon threads, which Python itself stops a moment later; an error would
    only be printed.
    """
    if getattr(error, "at_exit", False):
        while threading.current_thread() is not threading.main_thread():
            time.sleep(3600)


def in_running_loop() -> bool:
    """Whether this thread is inside a running asyncio or trio loop."""
    try:
        asyncio.get_running_loop()
        return True
    except RuntimeError:
        return _trio_says("in_trio_run")


def _trio_says(question: str) -> bool:
    """What a function of ``trio.lowlevel`` answers; False while another thread imports trio."""
    lowlevel = getattr(sys.modules.get("trio"), "lowlevel", None)
    ask = getattr(lowlevel, question, None)
    return ask is not None and bool(ask())
