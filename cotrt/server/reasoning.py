"""Splits a reasoning model's text into what stands inside ``<think>...</think>`` and the rest."""

from __future__ import annotations

OPEN, CLOSE = "<think>", "</think>"


def held_back(text: str, tag: str) -> int:
    """How many characters at the end of `text` may be the beginning of `tag`."""
    for size in range(min(len(tag) - 1, len(text)), 0, -1):
        if tag.startswith(text[-size:]):
            return size
    return 0


class ReasoningSplitter:
    """Text in, (reasoning, content) out, piece by piece.

    Only a text that begins with ``<think>``, or whose prompt has opened it, has reasoning; white
    space around the tags belongs to neither.

    Args:
        begins_inside: the prompt ends with an open ``<think>``.
    """

    def __init__(self, *, begins_inside: bool) -> None:
        self._state = "thinking" if begins_inside else "start"
        self._held = ""
        self._strip = begins_inside

    def append(self, text: str) -> tuple[str, str]:
        """What is certain now."""
        return self._take(self._held + text, last=False)

    def finish(self) -> tuple[str, str]:
        """What was held back."""
        return self._take(self._held, last=True)

    def _take(self, text: str, *, last: bool) -> tuple[str, str]:
        self._held = ""
        if self._state == "start":
            body = text.lstrip()
            if body.startswith(OPEN):
                self._state, self._strip = "thinking", True
                text = body[len(OPEN) :]
            elif OPEN.startswith(body) and not last:
                self._held = text
                return "", ""
            else:
                self._state = "content"
                self._strip = False
        if self._state == "content":
            return "", self._stripped(text)
        thought, tag, rest = text.partition(CLOSE)
        if tag:
            reasoning = self._stripped(thought).rstrip()
            self._state, self._strip = "content", True
            return reasoning, self._stripped(rest)
        if last:
            return self._stripped(thought).rstrip(), ""
        # White space may turn out to stand before the closing tag.
        keep = len(thought) - held_back(thought, CLOSE)
        keep = len(thought[:keep].rstrip())
        self._held = thought[keep:]
        return self._stripped(thought[:keep]), ""

    def _stripped(self, text: str) -> str:
        if self._strip:
            text = text.lstrip()
            self._strip = not text
        return text
