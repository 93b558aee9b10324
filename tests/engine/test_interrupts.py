"""The shield that makes Ctrl-C wait."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from cotrt.engine.interrupts import InterruptShield


def ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_a_ctrl_c_waits_for_the_last_release() -> None:
    shield, before = InterruptShield(), signal.getsignal(signal.SIGINT)
    shield.hold()
    shield.hold()
    ctrl_c()
    shield.release()
    with pytest.raises(KeyboardInterrupt):
        shield.release()
    assert signal.getsignal(signal.SIGINT) is before
    shield.hold()
    shield.release()  # it was told once


def test_outside_it_is_python_s_own() -> None:
    shield = InterruptShield()
    shield.hold()
    shield.release()
    with pytest.raises(KeyboardInterrupt):
        ctrl_c()


def test_handlers_of_the_program_and_none_at_all_are_kept() -> None:
    shield, before, calls = InterruptShield(), signal.getsignal(signal.SIGINT), []

    def handler(number: int, frame: object) -> None:
        calls.append(number)

    try:
        signal.signal(signal.SIGINT, handler)
        shield.hold()
        ctrl_c()
        assert calls == []
        shield.release()
        assert calls == [signal.SIGINT] and signal.getsignal(signal.SIGINT) is handler
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        shield.hold()
        ctrl_c()
        shield.release()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_are_not_concerned() -> None:
    shield = InterruptShield()

    def use() -> None:
        shield.hold()
        shield.release()

    thread = threading.Thread(target=use)
    shield.hold()
    thread.start()
    thread.join()
    ctrl_c()
    with pytest.raises(KeyboardInterrupt):
        shield.release()
