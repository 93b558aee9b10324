"""Ctrl-C waits while the main thread changes the tree.

Python raises KeyboardInterrupt between any two bytecodes of the main thread. In the middle of a
fork or a prune it would leave a block without its holder, or a lock taken for ever; so SIGINT's
handler is put aside for the microseconds that the engine's lock is held, and called afterwards.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class InterruptShield:
    """Puts SIGINT's handler aside between `hold` and `release`; in other threads both do nothing.

    Pairs may be nested.
    """

    def __init__(self) -> None:
        self._main = threading.main_thread().ident
        self._depth = 0
        self._handler: Any = None
        self._noted: tuple[int, FrameType | None] | None = None
        self._put_aside = self._note  # one object, to be known again

    def hold(self) -> None:
        if threading.get_ident() != self._main:
            return
        if self._depth == 0:
            handler = signal.getsignal(signal.SIGINT)
            # Else it is ignored, ends the process, is not Python's, or is being put back just now.
            if callable(handler) and handler is not self._put_aside:
                try:
                    signal.signal(signal.SIGINT, self._put_aside)
                except ValueError:  # this is no main interpreter: it gets no signals
                    handler = None
                self._handler = handler
        self._depth += 1

    def release(self) -> None:
        """Put the handler back, and call it if there was a Ctrl-C.

        Raises:
            KeyboardInterrupt: or what else the handler raises.
        """
        if threading.get_ident() != self._main:
            return
        if self._depth > 1:
            self._depth -= 1
            return
        handler, self._handler = self._handler, None
        self._depth = 0
        if handler is None:
            return
        signal.signal(signal.SIGINT, handler)
        noted, self._noted = self._noted, None
        if noted is not None:
            handler(*noted)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = (number, frame)


shield = InterruptShield()
