"""The engine's thread: runs steps while there is work, and stops when the program ends."""

from __future__ import annotations

import atexit
import ctypes
import itertools
import os
import queue
import threading
import time
import weakref

from cotrt.engine.engine import Engine
from cotrt.engine.promise import sleep_at_exit
from cotrt.errors import EngineDeadError

# How long a program's end waits for the step in flight, in seconds: first for the step to end,
# then for the step to be broken off between two of its operations.
_PATIENCE = 1.0
_LAST_PATIENCE = 0.6
# A native step ends some milliseconds after it is broken off. Where the machine has no core for it
# that takes longer, and it is waited for: coming back to a Python that has ended it would abort the
# process.
_NATIVE_PATIENCE = 20.0

# By number: all that live, and some that are dead. No WeakSet: its callback is Python code, into
# which a Ctrl-C can fall.
_drivers: dict[int, weakref.ref[Driver]] = {}
_numbers = itertools.count()


class Driver:
    """Owns the thread in which an engine's steps run.

    The thread holds the engine but not its driver, so that it ends when everybody has dropped
    the driver, and the engine's memory is given back.

    Attributes:
        engine: the engine.
        forked: the process was forked; this copy of the engine has no thread.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.forked = False
        self._bell = _Bell()
        engine.on_work = self._bell.ring
        self._thread = threading.Thread(
            target=_run, args=(engine, self._bell), name="cotrt-engine", daemon=True
        )
        self._thread.start()
        for number, reference in list(_drivers.items()):
            if reference() is None:
                _drivers.pop(number, None)
        _drivers[next(_numbers)] = weakref.ref(self)
        self._bell.watch(self)

    def check_process(self) -> None:
        """Raise EngineDeadError in a child that was forked from the engine's process."""
        if self.forked:
            raise EngineDeadError(
                "this process was forked after the LLM was made, and the engine's thread stayed "
                "with the parent: make the LLM in the child, or start processes by spawn"
            )

    def check(self) -> None:
        """Raise EngineDeadError if nothing can run any more."""
        self.check_process()
        if self.engine.dead is not None:
            sleep_at_exit(self.engine.dead)
            raise EngineDeadError(str(self.engine.dead)) from self.engine.dead.__cause__

    def stop(self) -> None:
        """End all work with EngineDeadError, and the thread with it.

        It waits for the step in flight, for a time at most; a step that takes longer ends later.
        """
        self._ask_to_stop()
        self._join(time.monotonic() + _PATIENCE + _LAST_PATIENCE)

    def _ask_to_stop(self, *, at_exit: bool = False) -> None:
        if self.forked:
            return
        with self.engine.lock:
            if self.engine.dead is None:
                why = "the program is ending" if at_exit else "the LLM was closed"
                self.engine.stop(why, silently=at_exit)
        self._bell.stop()

    def _join(self, deadline: float) -> bool:
        """Whether the thread has ended before `deadline`."""
        if not self.forked and threading.current_thread() is not self._thread:
            self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def _break_off(self) -> None:
        """End the step: at the model's next layer, or else at the thread's next bytecode."""
        interrupt = getattr(self.engine.model, "interrupt", None)
        if interrupt is not None and not self.forked:
            interrupt()
        if self._thread.ident is not None and not self.forked:
            ident = ctypes.c_ulong(self._thread.ident)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(_BrokenOff))


class _Bell:
    """Wakes the engine's thread. It takes no lock, so that anybody can ring it."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[weakref.ref[Driver] | None] = queue.SimpleQueue()
        self._is_rung = False
        self._driver: weakref.ref[Driver] | None = None
        self.is_stopped = False

    def ring(self) -> None:
        if not self._is_rung:
            self._is_rung = True
            self._queue.put(None)

    def wait(self) -> None:
        """Until it is rung. Whoever rings from here on is heard by the next `wait`."""
        if self._queue.get() is not None:
            self.is_stopped = True
        self._is_rung = False

    def stop(self) -> None:
        self.is_stopped = True
        self.ring()

    def watch(self, driver: Driver) -> None:
        """Stop when `driver` is dead."""
        self._driver = weakref.ref(driver, self._queue.put)  # in C: see handle_ref.py


class _BrokenOff(BaseException):
    """The program is ending, and this step took too long."""


def _run(engine: Engine, bell: _Bell) -> None:
    try:
        while not bell.is_stopped:
            bell.wait()
            while not bell.is_stopped and engine.step():
                pass
        engine.settle()
    except BaseException as error:
        # Where a law was broken, the engine has told every waiter. This is for what came from
        # outside of its reach: SystemExit out of a user's own model, say.
        with engine.lock:
            if engine.dead is None:
                engine.stop(f"the engine stopped: {type(error).__name__}: {error}", error)
    finally:
        if engine.records is not None:  # nobody else may be left to do it
            engine.records.close()


def _living_drivers() -> list[Driver]:
    drivers = (reference() for reference in list(_drivers.values()))
    return [driver for driver in drivers if driver is not None]


def _stop_all() -> None:
    drivers = [driver for driver in _living_drivers() if not driver.forked]
    for driver in drivers:
        driver._ask_to_stop(at_exit=True)
    deadline = time.monotonic() + _PATIENCE
    late = [driver for driver in drivers if not driver._join(deadline)]
    for driver in late:
        driver._break_off()
    broken_off = time.monotonic()
    for driver in late:
        is_native = hasattr(driver.engine.model, "interrupt")
        driver._join(broken_off + (_NATIVE_PATIENCE if is_native else _LAST_PATIENCE))


def _after_fork_in_child() -> None:
    for driver in _living_drivers():
        driver.forked = True


atexit.register(_stop_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
