"""The engine's thread: runs steps while there is work, and stops when the program ends."""

from __future__ import annotations

import atexit
import os
import threading
import weakref

from cotrt.engine.engine import Engine
from cotrt.errors import EngineDeadError

# How long a program's end waits for the step in flight.
_STOP_TIMEOUT = 1.5

_drivers: weakref.WeakSet[Driver] = weakref.WeakSet()


class Driver:
    """Owns the thread in which an engine's steps run.

    Attributes:
        engine: the engine.
        forked: the process was forked; this copy of the engine has no thread.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.forked = False
        self._wake = threading.Event()
        self._stopping = False
        engine.on_work = self._wake.set
        self._thread = threading.Thread(target=self._loop, name="cotrt-engine", daemon=True)
        _drivers.add(self)
        self._thread.start()

    def check(self) -> None:
        """Raise EngineDeadError if nothing can run any more."""
        if self.forked:
            raise EngineDeadError(
                "this process was forked after the LLM was made, and the engine's thread stayed "
                "with the parent: make the LLM in the child, or start processes by spawn"
            )
        if self.engine.dead is not None:
            raise EngineDeadError(str(self.engine.dead)) from self.engine.dead.__cause__

    def stop(self) -> None:
        """End all work with EngineDeadError and the thread with it."""
        if self.forked:
            return
        with self.engine.lock:
            if self.engine.dead is None:
                self.engine.stop("the LLM was closed")
        self._stopping = True
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_STOP_TIMEOUT)

    def _loop(self) -> None:
        while not self._stopping:
            self._wake.wait()
            self._wake.clear()
            try:
                while not self._stopping and self.engine.step():
                    pass
            except BaseException:
                # The engine has recorded the cause and told every waiter.
                return


def _stop_all() -> None:
    for driver in list(_drivers):
        driver.stop()


def _after_fork_in_child() -> None:
    for driver in list(_drivers):
        driver.forked = True


atexit.register(_stop_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
