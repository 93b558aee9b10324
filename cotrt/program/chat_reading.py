"""What a chat's ids say, as its template wrote it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from cotrt.models.added_token import AddedToken
from cotrt.sampling.detokenizer import text_after

if TYPE_CHECKING:
    from cotrt.models.prepared_chat import PreparedChat


class ChatTokenizer(Protocol):
    """What is asked of a tokenizer here."""

    @property
    def added_tokens(self) -> Mapping[int, AddedToken]: ...

    @property
    def space_after_added(self) -> bool: ...

    def decode(self, ids: Sequence[int], /, *, skip_special_tokens: bool = False) -> str: ...

    def token_text(self, token_id: int, /) -> str: ...


def read_chat(
    tokenizer: ChatTokenizer, ids: Sequence[int], rendered: str, sampled: Sequence[int]
) -> str:
    """Text of a chat's ids.

    That is their decoded text, but for what ids do not tell. Then it is read as in `rendered`, if
    that agrees so far:

    - Some tokenizers put a dummy space after an added token. It is no text. Where the model itself
      made the token that begins with it, the reply's text may show it.
    - Some added tokens swallow the white space around them.

    Args:
        tokenizer: of the model.
        ids: of the chat.
        rendered: what the template writes now.
        sampled: for each id, whether the model made it.
    """
    strips = any(token.lstrip or token.rstrip for token in tokenizer.added_tokens.values())
    if not (strips or tokenizer.space_after_added):
        return text_after(tokenizer, ids)
    read = _Reading(rendered)
    begin = 0
    for place, token_id in enumerate([*ids, -1]):
        added = tokenizer.added_tokens.get(token_id)
        if added is None and place < len(ids):
            continue
        if begin < place:
            run = ids[begin:place]
            if tokenizer.space_after_added:
                text = text_after(tokenizer, run)
                if sampled[begin] and tokenizer.token_text(run[0]).startswith(" "):
                    text = read.spaced(text)
            else:  # only a whole text has a dummy space: this one follows another
                text = text_after(tokenizer, run, ids[begin - 1 : begin])
            read.add(text)
        if added is not None:
            if added.lstrip:
                read.skip_space(before=added.text)
            read.add(added.text)
            if added.rstrip:
                read.skip_space()
        begin = place + 1
    return read.text


class _Reading:
    """A text that grows beside a rendered one, for as long as they are the same."""

    def __init__(self, rendered: str) -> None:
        self._rendered = rendered
        self._parts: list[str] = []
        self._length = 0
        self._agrees = True

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def add(self, text: str) -> None:
        if self._agrees and not self._rendered.startswith(text, self._length):
            self._agrees = False
        self._parts.append(text)
        self._length += len(text)

    def skip_space(self, before: str = "") -> None:
        """Take the white space that the rendered text has here, if `before` follows it."""
        end = self._length
        while self._agrees and self._rendered[end : end + 1].isspace():
            end += 1
        if self._agrees and self._rendered.startswith(before, end):
            self.add(self._rendered[self._length : end])

    def spaced(self, text: str) -> str:
        """The text with the space that its first token begins with, if that is rendered."""
        spaces = len(text) - len(text.lstrip(" ")) + 1
        shown = self._agrees and self._rendered.startswith(" " * spaces, self._length)
        return f" {text}" if shown else text


def continue_chat(
    tokenizer: Any, chat: PreparedChat, history: Sequence[int], sampled: Sequence[int]
) -> tuple[int, list[int]]:
    """How many ids of a history say what a rendered chat begins with, and those that follow.

    Args:
        tokenizer: of the model.
        chat: from its ``prepare_chat``.
        history: ids.
        sampled: for each, whether the model made it.
    """

    def read(length: int) -> str:
        return read_chat(tokenizer, history[:length], chat.text, sampled)

    keep, before = _common_ids(read, len(history), chat.text)
    last_id = history[keep - 1] if keep else None
    return keep, tokenizer.encode_prepared(chat, after=before, last_id=last_id)


def _common_ids(read: Callable[[int], str], num_ids: int, rendered: str) -> tuple[int, int]:
    """How many leading ids say what the rendered text begins with.

    Args:
        read: the text of so many leading ids.
        num_ids: how many there are.
        rendered: what the template writes now.

    Returns:
        That number, and how many characters they say.
    """
    history = read(num_ids)
    if rendered.startswith(history):
        return num_ids, len(history)
    low, high = 0, len(history)  # characters in common: between the two
    while low < high:
        middle = (low + high + 1) // 2
        if rendered.startswith(history[:middle]):
            low = middle
        else:
            high = middle - 1
    common = low
    low, high = 0, num_ids  # the last token that ends within them
    while low < high:
        middle = (low + high + 1) // 2
        if len(read(middle)) <= common:
            low = middle
        else:
            high = middle - 1
    while low:  # not inside a character
        begin = read(low)
        if rendered.startswith(begin):
            return low, len(begin)
        low -= 1
    return 0, 0
