"""What moving KV costs and what computing it costs, both as measured: the choice between them."""

from __future__ import annotations

from dataclasses import dataclass, field

# Of the last measurements' weight, this much is given to a new one.
_NEW_SHARE = 0.2
# Where moving looks too dear, one candidate in this many is moved all the same: a tier that was
# slow once is measured again.
_PROBE_EVERY = 64


@dataclass(slots=True)
class Mean:
    """An exponential moving average of seconds a unit; None before the first measurement."""

    value: float | None = None

    def note(self, units: float, seconds: float) -> None:
        """`units` took `seconds`."""
        if units <= 0:
            return
        new = seconds / units
        old = self.value
        self.value = new if old is None else old + _NEW_SHARE * (new - old)


@dataclass(slots=True)
class TierSpeed:
    """Seconds a byte into and out of one tier, its overhead by record included."""

    write: Mean = field(default_factory=Mean)
    read: Mean = field(default_factory=Mean)


class TierCosts:
    """Chooses between moving a record and computing its tokens again.

    Moving costs its bytes twice, out and back, over the measured bandwidth of its tier; computing
    costs its tokens over the measured speed of prefill. Before both are known it moves.

    Args:
        always: "move" or "compute" whatever was measured; None to compare.
    """

    # Of steps with fewer rows than this a row's share says little of what it costs in a prefill.
    MIN_ROWS = 32

    def __init__(self, *, always: str | None = None) -> None:
        assert always in (None, "move", "compute")
        self._always = always
        self.taking_in = Mean()  # seconds a byte of a step's loads, their reads done before
        self._prefill = Mean()
        self._speeds: dict[str, TierSpeed] = {}
        self._num_refused = 0

    def speed(self, tier: str) -> TierSpeed:
        """The speed of a tier, by its name."""
        return self._speeds.setdefault(tier, TierSpeed())

    def note_step(self, num_rows: int, seconds: float) -> None:
        """A step of `num_rows` rows took `seconds`."""
        if num_rows >= self.MIN_ROWS:
            self._prefill.note(num_rows, seconds)

    def compute_seconds(self, num_tokens: int) -> float | None:
        """Seconds to compute tokens again; None where it is not known."""
        return None if self._prefill.value is None else num_tokens * self._prefill.value

    def read_seconds(self, tier: str, num_bytes: int) -> float | None:
        """Seconds to read from a tier; None where it is not known."""
        value = self.speed(tier).read.value
        return None if value is None else num_bytes * value

    def should_store(self, tier: str, num_tokens: int, num_bytes: int) -> bool:
        """Storing these tokens' KV is cheaper than computing them again."""
        speed = self.speed(tier)
        move = num_bytes * ((speed.write.value or 0.0) + (speed.read.value or 0.0))
        return self._moves(num_tokens, move)

    def should_load(self, tier: str, num_tokens: int, num_bytes: int) -> bool:
        """Reading these tokens' KV, which a tier has, is cheaper than computing them."""
        return self._moves(num_tokens, self.read_seconds(tier, num_bytes) or 0.0)

    def _moves(self, num_tokens: int, move: float) -> bool:
        if self._always is not None:
            return self._always == "move"
        compute = self.compute_seconds(num_tokens)
        if compute is None or move <= compute:
            return True
        self._num_refused += 1
        return self._num_refused % _PROBE_EVERY == 0
