"""A token that a tokenizer matches whole in a text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AddedToken:
    """Special or not.

    Attributes:
        text: its spelling.
        lstrip, rstrip: it swallows white space before it, or after it.
    """

    text: str
    lstrip: bool = False
    rstrip: bool = False
