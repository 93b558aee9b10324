"""Stop strings over text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string was completed.

    Attributes:
        stop: the string.
        num_tokens: ids of the append that were used, the one that completed it included (0 where
            text and not ids were appended).
    """

    stop: str
    num_tokens: int = 0


class StopChecker:
    """Collects text, finds the stop string that ends first, and cuts there.

    Text may be hidden (a skipped special token's): it is matched like any other but not shown.
    Of stops that end at the same character the longest is taken, so that how text is cut into
    pieces does not matter.

    Args:
        stop: the strings, none empty.
        include_stop_str_in_output: cut after the string and not before it; then all of it is
            shown, hidden text too.
    """

    def __init__(self, stop: Sequence[str], include_stop_str_in_output: bool = False) -> None:
        assert "" not in stop
        self._stop = sorted(stop, key=len, reverse=True)
        self._include = include_stop_str_in_output
        self._reach = max(map(len, stop), default=1) - 1
        # Shown and hidden text, piece by piece, and how far safe_text has come (pieces, chars).
        self._pieces: list[tuple[str, bool]] = []
        self._next = (0, 0)
        self._tail = ""
        self.match: StopMatch | None = None

    def append(self, text: str, *, hidden: bool = False, check: bool = True) -> StopMatch | None:
        """Takes more text.

        Args:
            text: what comes next.
            hidden: match it, but do not show it.
            check: False takes it without looking for stops that end in it (before min_tokens).

        Returns:
            The match, once there is one; text after it is dropped.
        """
        if self.match is not None or not text:
            return self.match
        region = self._tail + text
        self._pieces.append((text, hidden))
        self._tail = region[-self._reach :] if self._reach else ""
        if not check:
            return None
        begin = len(region) - len(text)
        ends = []
        for order, stop in enumerate(self._stop):
            at = region.find(stop, max(0, begin - len(stop) + 1))
            if at >= 0:
                ends.append((at + len(stop), order, stop))
        if ends:
            end, _, stop = min(ends)
            self.match = StopMatch(stop)
            self._cut(len(region) - end, len(stop))
        return self.match

    def safe_text(self) -> str:
        """Shown text that no later match can take back, since the last call.

        After a match, or `finish`, that is all that is left.
        """
        held = 0 if self.match else self._held()
        ends = sum(len(text) for text, _ in self._pieces[self._next[0] :]) - self._next[1] - held
        shown = []
        while ends > 0:
            piece, done = self._next
            text, hidden = self._pieces[piece]
            part = text[done : done + ends]
            ends -= len(part)
            if not hidden:
                shown.append(part)
            done += len(part)
            self._next = (piece + 1, 0) if done == len(text) else (piece, done)
        return "".join(shown)

    def finish(self) -> str:
        """No more text comes: gives what `safe_text` still held back."""
        self._stop = []
        return self.safe_text()

    @property
    def text(self) -> str:
        """All shown text so far, cut at the match."""
        return "".join(text for text, hidden in self._pieces if not hidden)

    def _held(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        return max((self._overlap(stop) for stop in self._stop), default=0)

    def _overlap(self, stop: str) -> int:
        for length in range(min(len(stop) - 1, len(self._tail)), 0, -1):
            if self._tail.endswith(stop[:length]):
                return length
        return 0

    def _cut(self, after: int, length: int) -> None:
        """Drops ``after`` characters at the end, and hides or shows the match before them."""
        self._drop(after)
        matched = self._drop(length)
        if self._include:
            self._pieces.append((matched, False))

    def _drop(self, count: int) -> str:
        """Takes characters off the end and gives them."""
        dropped: list[str] = []
        while count > 0:
            text, hidden = self._pieces.pop()
            kept = text[: max(0, len(text) - count)]
            dropped.append(text[len(kept) :])
            count -= len(text) - len(kept)
            if kept:
                self._pieces.append((kept, hidden))
        return "".join(reversed(dropped))
