"""A rendered chat, and its ids: what a template wrote is told from what somebody said."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import InvalidRequestError

if TYPE_CHECKING:
    from .tokenizer import Codec


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A rendered chat that still knows what the template wrote and what was said.

    Attributes:
        text: what the model will see.
        source: the text, with `guard` inside every special token's spelling that was said.
        guard: a character that nobody said, or "" where nobody spelled a special token.
    """

    text: str
    source: str
    guard: str


class ChatEncoder:
    """Encodes rendered chats, whole or from a place within.

    Args:
        codec: of the model's tokenizer.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        added = {token.text for token in codec.added_tokens.values()}
        self._spellings = _any_of(codec.special_tokens)
        self._added_spellings = _any_of(added)
        self._plain_spellings = _any_of(added - set(codec.special_tokens))

    def guard(self, said: Any) -> str:
        """A character that nobody said, where somebody spelled a special token; else ""."""
        texts = _strings(said)
        if any(self._spellings.search(text) for text in texts):
            return _unused_character(texts)
        return ""

    def encode(self, chat: PreparedChat, after: int, last_id: int | None) -> list[int]:
        """Ids of a rendered chat.

        Args:
            chat: the chat.
            after: leave out so many characters, which the ids then follow.
            last_id: the last id of those characters.
        """
        guard, text = chat.guard, chat.source
        follows = after > 0 and not (
            self._codec.space_after_added and last_id in self._codec.added_tokens
        )
        if not guard:
            return self._encode_part(text[after:], follows, special=True)
        # The guard breaks the spellings that were said, so what matches now the template wrote.
        # Those are ids; all between them is plain text, from which the guard is taken out.
        ids: list[int] = []
        start, skip, swallows = 0, after, False
        for match in [*self._spellings.finditer(text), None]:
            said = text[start : None if match is None else match.start()].replace(guard, "")
            token_id = None if match is None else self._codec.special_tokens[match[0]]
            token = None if token_id is None else self._codec.added_tokens.get(token_id)
            begin, end = skip, len(said)
            if swallows:
                begin = max(begin, len(said) - len(said.lstrip()))
            if token is not None and token.lstrip:
                end = len(said.rstrip())
            ids += self._encode_part(said[begin:end], follows, special=False)
            skip = max(0, skip - len(said))
            if match is None or token_id is None:
                break
            start, swallows = match.end(), token is not None and token.rstrip
            if skip:
                skip = max(0, skip - len(match[0]))
            else:
                ids.append(token_id)
                follows = not self._codec.space_after_added
        return ids

    def _encode_part(self, text: str, follows: bool, *, special: bool) -> list[int]:
        """Ids of a part of a rendered chat, as they are in the whole."""
        if not text:
            return []
        ids: list[int] = []
        if follows and self._codec.space_after_added:
            # Only what comes before the next added token follows a text; later parts have their
            # dummy spaces.
            spellings = self._added_spellings if special else self._plain_spellings
            if found := spellings.search(text):
                ids = self._encode_part(text[: found.start()], True, special=False)
                text, follows = text[found.start() :], False
        return ids + self._codec.encode(text, whole=False, special=special, continues=follows)


def _any_of(spellings: Iterable[str]) -> re.Pattern[str]:
    """Matches each of the spellings, the longest first; nothing where there are none."""
    return re.compile(
        "|".join(map(re.escape, sorted(filter(None, spellings), key=len, reverse=True))) or "(?!)"
    )


def _strings(value: Any) -> list[str]:
    """Every string in nested data."""
    found: list[str] = []
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            found.append(item)
        elif isinstance(item, Mapping):
            pending += item.values()
        elif isinstance(item, (list, tuple)):
            pending += item
        elif callable(getattr(item, "model_dump", None)):
            pending.append(item.model_dump())
    return found


def _unused_character(texts: Sequence[str]) -> str:
    """A private-use character that none of the texts holds."""
    used = set().union(*texts)
    for code in range(0xE100, 0xF8FF):
        if chr(code) not in used:
            return chr(code)
    raise InvalidRequestError("messages use every private-use character there is.")
