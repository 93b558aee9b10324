"""The text of token ids that follow other ids: as they come, or at once, in linear time.

Some decoders treat the start of a text in their own way (SentencePiece drops a space there), and a
character may be begun by the ids before. So no text is ever made of a slice of ids alone: every
text of the house comes from a `Detokenizer`, which is told what stands before.

A window of the last ids is decoded again with every append. What the new text adds to the old is
given out, but for replacement characters at the end, which may stand for the first bytes of a
character whose last ones are still to come. When the window has grown it is cut where a character
ended, so a long output costs no more a token than a short one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
# A window this long is cut. Both numbers leave room for some characters of four tokens each.
MAX_WINDOW = 24
MIN_CONTEXT = 6
# Callers hand over so many of the ids before, or all where there are fewer.
NUM_CONTEXT_IDS = MAX_WINDOW
# Ids that have no text (skipped special tokens) cannot serve as context alone; this many may wait.
MAX_SILENT_WINDOW = 256


class Decoder(Protocol):
    """What is asked of a tokenizer here."""

    def decode(self, ids: Sequence[int], /, *, skip_special_tokens: bool = False) -> str: ...


def text_after(
    tokenizer: Decoder,
    ids: Sequence[int],
    before: Sequence[int] = (),
    *,
    skip_special_tokens: bool = False,
) -> str:
    """Text of `ids` where they stand after `before`; of which the last NUM_CONTEXT_IDS are enough.

    A character that `before` began and `ids` complete is part of the text.
    """
    text = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens, context_ids=before)
    return text.append(ids) + text.flush()


class Detokenizer:
    """Text of a growing list of ids.

    Args:
        tokenizer: decodes; ids outside its vocabulary have no text.
        skip_special_tokens: leave special tokens out.
        context_ids: what comes before; the first text follows theirs. A character that they began
            belongs to the new text.
    """

    def __init__(
        self,
        tokenizer: Decoder,
        *,
        skip_special_tokens: bool = True,
        context_ids: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window: list[int] = []
        # Ids at the window's start after which a character had ended, and their text.
        self._num_complete = 0
        self._base = ""
        # Characters after that text which were given out.
        self._num_sent = 0
        # What followed that text at first, where it may be an incomplete character.
        self._open_context = ""
        if len(context_ids):
            self._begin(list(context_ids[-MAX_WINDOW:]))

    def append(self, ids: Sequence[int]) -> str:
        """Takes the next ids and gives the text that is final now."""
        text = self._decode([*self._window, *ids])
        if len(ids) > 1 and REPLACEMENT in text:
            # Damage is shown alike, however the ids come.
            return "".join([self.append([token_id]) for token_id in ids])
        self._window.extend(ids)
        rest = self._rest(text)
        final = rest.rstrip(REPLACEMENT)
        if self._open_context and len(final) > self._num_sent:
            if final.startswith(self._open_context):  # it was a replacement character indeed
                self._num_sent = len(self._open_context)
            self._open_context = ""
        new = final[self._num_sent :]
        self._num_sent = max(self._num_sent, len(final))
        if len(final) == len(rest):
            boundary = self._num_complete
            self._complete(text)
            if len(self._window) > MAX_WINDOW:
                self._cut(boundary)
        elif len(self._window) - self._num_complete > MAX_WINDOW:
            new += self._give_up_on_damage(text, rest)
        return new

    def flush(self) -> str:
        """Gives what was held back: an incomplete character as U+FFFD."""
        text = self._decode(self._window)
        rest = self._rest(text)
        held = "" if rest == self._open_context else rest[self._num_sent :]
        self._complete(text)
        return held

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)

    def _rest(self, text: str) -> str:
        """What the window's text has after its complete part."""
        if text.startswith(self._base):
            return text[len(self._base) :]
        # A run of byte tokens that is no UTF-8 as a whole is decoded to U+FFFD alone, characters
        # before the damage too: those were complete.
        return self._decode(self._window[self._num_complete :])

    def _complete(self, text: str) -> None:
        """All of the window's text was given out."""
        self._num_complete, self._base = len(self._window), text
        self._num_sent, self._open_context = 0, ""

    def _begin(self, context: list[int]) -> None:
        """Takes some last ids of the context as the first window.

        A window that begins inside a character would spoil what follows, and where the context
        ends inside one, up to three ids after the last whole one are not given out yet.
        """
        for begun in range(min(4, len(context))):
            end = len(context) - begun
            for size in range(MIN_CONTEXT, MIN_CONTEXT + 8):
                text = self._decode(context[max(0, end - size) : end])
                if text and not (text.startswith(REPLACEMENT) or text.endswith(REPLACEMENT)):
                    self._window = context[max(0, end - size) :]
                    self._num_complete, self._base = len(self._window) - begun, text
                    if begun:
                        self._open_context = self._rest(self._decode(self._window))
                    return
                if size >= end:
                    break
        self._window = context[-MIN_CONTEXT:]
        self._open_context = self._decode(self._window)
        self._num_sent = len(self._open_context.rstrip(REPLACEMENT))

    def _cut(self, at: int) -> None:
        """Drops the window's ids before ``at``; all of its text was given out."""
        # Where all ids came at once, no boundary is known yet but the window's end.
        at = at if 0 < at < len(self._window) else len(self._window) - MIN_CONTEXT
        context = self._window[at:]
        text = self._decode(context)
        usable = text and not text.startswith(REPLACEMENT) and not text.endswith(REPLACEMENT)
        if usable or len(self._window) > MAX_SILENT_WINDOW:
            self._window = context
            self._complete(text)

    def _give_up_on_damage(self, text: str, rest: str) -> str:
        """Gives out most of a long run of bytes that are no characters; keeps its last ids.

        The run is cut where its two parts decode to what they do together.
        """
        run = self._window[self._num_complete :]
        for kept in range(4, 8):
            before, after = self._decode(run[:-kept]), self._decode(run[-kept:])
            if before + after == rest:
                new = before[self._num_sent :]
                self._window, self._num_complete, self._base = run[-kept:], 0, ""
                self._num_sent = max(0, self._num_sent - len(before))
                return new
        new = rest[self._num_sent :]
        self._complete(text)
        return new
