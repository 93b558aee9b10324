"""Texts of nodes: exact where a node ends inside a character."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# An incomplete UTF-8 character has at most 3 bytes, so at most 3 byte tokens.
_MAX_PENDING = 4


def token_texts(
    tokenizer: Any, ids: Sequence[int], pending: Sequence[int] = ()
) -> tuple[list[str], list[int]]:
    """One text a token, whose joined text is that of all of them.

    A token inside a character of several tokens has the text "", the last one the character.

    Args:
        tokenizer: with ``decode(ids)``; None gives empty texts.
        ids: tokens.
        pending: tokens before them whose character was not complete.

    Returns:
        The texts, and the ids at the end whose character is not complete.
    """
    if tokenizer is None:
        return [""] * len(ids), []
    texts: list[str] = []
    waiting = list(pending)
    for token in ids:
        waiting.append(token)
        text = tokenizer.decode(waiting)
        if text.endswith("�") and len(waiting) < _MAX_PENDING:
            texts.append("")
        else:
            texts.append(text)
            waiting = []
    return texts, waiting


def ends_inside_stop(text: str, stops: Sequence[str]) -> bool:
    """The text ends with the beginning of a stop string, or inside a character."""
    if text.endswith("�"):
        return True
    return any(text.endswith(stop[:length]) for stop in stops for length in range(1, len(stop)))


def find_stop(text: str, fresh: int, stops: Sequence[str]) -> str | None:
    """The stop string that ends first among those that end in the last `fresh` characters."""
    best: tuple[int, str] | None = None
    for stop in stops:
        at = text.find(stop, max(0, len(text) - fresh - len(stop) + 1))
        if at >= 0 and (best is None or at + len(stop) < best[0]):
            best = (at + len(stop), stop)
    return best[1] if best else None
