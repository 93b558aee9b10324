"""Errors that a program keeps, and what they must not keep: steps, sequences, device memory."""

from __future__ import annotations

import inspect
import traceback

_PAUSES = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def let_go(error: BaseException) -> None:
    """Empty the frames that `error` came through, which is all that its traceback needs them for.

    A frame holds its callers too (``f_back``), those beyond the place where the error was caught
    among them: where these have returned, they are emptied as well.
    """
    trace = error.__traceback__
    traceback.clear_frames(trace)
    frame = None if trace is None else trace.tb_frame.f_back
    while frame is not None and not frame.f_code.co_flags & _PAUSES:
        try:
            frame.clear()
        except RuntimeError:  # it runs, and so do all that called it
            return
        frame = frame.f_back
