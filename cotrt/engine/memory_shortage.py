"""Errors that say that the device has no memory left, and what is done at once."""

from __future__ import annotations

import sys
from typing import Any

from cotrt.engine.kept_errors import let_go

# How torch puts it where it has no class of its own for it: its CPU allocator, and CUDA itself.
_SAID = ("can't allocate memory", "out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error`, raised by a model's step, says that memory has run out."""
    torch = sys.modules.get("torch")
    kinds = (MemoryError,) if torch is None else (MemoryError, torch.OutOfMemoryError)
    if isinstance(error, kinds):
        return True
    return isinstance(error, RuntimeError) and any(said in str(error) for said in _SAID)


def give_back_memory(model: Any, error: BaseException) -> None:
    """Drop what the failed step still holds, so that a smaller one finds room."""
    let_go(error)
    give_back = getattr(model, "give_back_memory", None)
    if give_back is not None:
        give_back()
