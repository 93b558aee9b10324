"""How many tokens a step may have, where the device may run out of memory."""

from __future__ import annotations

# Steps that have to go well before the limit doubles again, at first and at most.
_FIRST_STREAK, _LONGEST_STREAK = 16, 4096


class StepLimit:
    """Halved when a step did not fit the device's memory, doubled when many have gone well.

    Each time that it has to be halved it waits twice as long before it grows, so that a shortage
    that stays costs a failed step ever more rarely.

    Attributes:
        most: tokens that a step may have at most.
        tokens: tokens that the next step may have.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.tokens = most
        self._streak = 0
        self._needed = _FIRST_STREAK // 2
        self._has_retried = False

    def halve(self, num_tokens: int) -> bool:
        """A step of `num_tokens` did not fit: later ones have half of that at most.

        Returns:
            False if it was a single token, for the second time in a row: it is of no use to try
            again.
        """
        self._streak = 0
        if num_tokens < 2:
            self._has_retried = not self._has_retried
            return self._has_retried
        self.tokens = min(self.tokens, num_tokens) // 2
        self._needed = min(2 * self._needed, _LONGEST_STREAK)
        return True

    def note_success(self) -> None:
        """A step has gone well."""
        self._has_retried = False
        if self.tokens < self.most:
            self._streak += 1
            if self._streak >= self._needed:
                self._streak = 0
                self.tokens = min(2 * self.tokens, self.most)
