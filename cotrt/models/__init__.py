"""Models: find, load, run, and their tokenizers.

`load` is all that the rest of cotrt needs; importing this package loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .loading import LoadedModel, load
    from .tokenizer import Tokenizer

__all__ = ["LoadedModel", "Tokenizer", "load"]

_WHERE = {"LoadedModel": "loading", "Tokenizer": "tokenizer", "load": "loading"}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
