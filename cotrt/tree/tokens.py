"""Token sequences that fork in constant time: spans that share their beginnings.

A branch's tokens outlive its KV, so they live here and not in the KV tree. A span holds the
tokens that one sequence appended; what came before is its parent span, up to `start`:

    root span   [0 1 2 3 4 5 6 7]          owner: the root, still appending
                        └─ span start=5 [a b c]       a child forked at length 5
"""

from __future__ import annotations


class TokenSpan:
    """The tokens from absolute position `start` on; earlier ones belong to `parent`.

    The owner appends. Children rely on the first `num_shared` tokens, which never change again.

    Attributes:
        parent: the span that holds the positions before `start`, or None when `start` is 0.
        start: absolute position of ``ids[0]``.
        ids: token ids.
        logprobs: raw log-probability of each sampled token, None where it was given.
        sampled: 1 where the token was sampled, 0 where it was given.
        num_shared: leading tokens that child spans look at.
    """

    __slots__ = ("ids", "logprobs", "num_shared", "parent", "sampled", "start")

    def __init__(self, parent: TokenSpan | None = None, start: int = 0) -> None:
        self.parent = parent
        self.start = start
        self.ids: list[int] = []
        self.logprobs: list[float | None] = []
        self.sampled = bytearray()
        self.num_shared = 0

    def __len__(self) -> int:
        """Absolute length: tokens from position 0 to the end of this span."""
        return self.start + len(self.ids)

    def extend(self, ids: list[int]) -> None:
        """Append given tokens."""
        self.ids.extend(ids)
        self.logprobs.extend([None] * len(ids))
        self.sampled.extend(bytes(len(ids)))

    def child(self, length: int) -> TokenSpan:
        """A span that goes on after the first `length` tokens; constant time per span passed."""
        span = self
        while span.parent is not None and length <= span.start:
            span = span.parent
        if length == 0:
            return TokenSpan()
        span.num_shared = max(span.num_shared, length - span.start)
        return TokenSpan(span, length)

    def truncated(self, length: int) -> TokenSpan:
        """This span cut to absolute `length`, in place if no child looks at what goes away."""
        keep = length - self.start
        if keep < self.num_shared:
            return self.child(length)
        del self.ids[keep:], self.logprobs[keep:], self.sampled[keep:]
        return self

    def _pieces(self, start: int, stop: int) -> list[tuple[TokenSpan, int, int]]:
        pieces = []
        span: TokenSpan | None = self
        while span is not None and start < stop:
            if span.start < stop:
                pieces.append((span, max(start, span.start) - span.start, stop - span.start))
                stop = max(start, span.start)
            span = span.parent
        pieces.reverse()
        return pieces

    def slice_ids(self, start: int, stop: int) -> list[int]:
        """Token ids at absolute positions `start` to `stop`."""
        if start >= self.start:
            return self.ids[start - self.start : stop - self.start]
        out: list[int] = []
        for span, low, high in self._pieces(start, stop):
            out += span.ids[low:high]
        return out

    def slice_logprobs(self, start: int, stop: int) -> list[float | None]:
        """Log-probabilities at absolute positions `start` to `stop`."""
        out: list[float | None] = []
        for span, low, high in self._pieces(start, stop):
            out += span.logprobs[low:high]
        return out

    def slice_sampled(self, start: int, stop: int) -> bytes:
        """One byte a token at positions `start` to `stop`: 1 where it was sampled."""
        if start >= self.start:
            return bytes(self.sampled[start - self.start : stop - self.start])
        return b"".join(bytes(s.sampled[lo:hi]) for s, lo, hi in self._pieces(start, stop))
