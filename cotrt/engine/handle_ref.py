"""A weak reference to the handle of a sequence."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from cotrt.tree.sequence import Sequence


class HandleRef(weakref.ref[Any]):
    """A handle, held weakly, and the sequence that it is the handle of.

    When the handle dies, `when_dead` is called with this reference, in any thread and between any
    two bytecodes. It has to be a function in C, like ``deque.append``: a Ctrl-C that fell into
    Python code there would be printed and forgotten, and the sequence with it.

    Sequence and reference hold each other until the engine has taken note.

    Attributes:
        seq: the sequence.
    """

    __slots__ = ("seq",)
    seq: Sequence

    def __new__(
        cls, handle: Any, when_dead: Callable[[HandleRef], None], seq: Sequence
    ) -> HandleRef:
        self = super().__new__(cls, handle, when_dead)
        self.seq = seq
        return self

    def __init__(self, handle: Any, when_dead: Callable[[HandleRef], None], seq: Sequence) -> None:
        super().__init__(handle, when_dead)  # type: ignore[call-arg]
