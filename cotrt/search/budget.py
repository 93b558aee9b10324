"""What a search may spend: sampled tokens, branches and time."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence

from cotrt.errors import InvalidRequestError


class Budget:
    """An account of sampled tokens, branches and seconds that searches spend from.

    It is never exceeded, and it is used up exactly where work remains. One budget given to several
    searches, one after the other or at once, is their common limit; `part` makes a limit within
    it. A budget stays spent: make a new one for a new run.

    Laws: ``0 <= spent_tokens + reserved <= max_tokens`` and ``spent_branches <= max_branches``,
    here and in every budget around it.

    Args:
        max_tokens: sampled tokens, probes, rollouts and critiques included.
        max_branches: branches forked to sample from.
        deadline_s: seconds from the moment the first search starts to spend.
        within: a budget around this one; what is spent here is spent there too.

    Raises:
        InvalidRequestError: a limit that is negative or no number.
    """

    def __init__(
        self,
        max_tokens: int | None = None,
        max_branches: int | None = None,
        deadline_s: float | None = None,
        *,
        within: Budget | None = None,
    ) -> None:
        for name, value in (("max_tokens", max_tokens), ("max_branches", max_branches)):
            if value is not None and (type(value) is not int or value < 0):
                raise InvalidRequestError(f"{name}={value!r}: must be None or an int of at least 0")
        if deadline_s is not None and not (
            isinstance(deadline_s, (int, float))
            and not isinstance(deadline_s, bool)
            and deadline_s >= 0
        ):
            raise InvalidRequestError(f"deadline_s={deadline_s!r}: must be None or seconds, >= 0")
        self.max_tokens = max_tokens
        self.max_branches = max_branches
        self.deadline_s = deadline_s
        self.within = within
        self.spent_tokens = 0
        self.spent_branches = 0
        self._reserved = 0
        self._deadline: float | None = None
        # One lock for a whole nest, so that a look at all its limits is one moment.
        self._lock: threading.Lock = threading.Lock() if within is None else within._lock

    def part(
        self,
        max_tokens: int | None = None,
        max_branches: int | None = None,
        deadline_s: float | None = None,
    ) -> Budget:
        """A budget within this one: it ends when its own limits or this one's are reached."""
        return Budget(max_tokens, max_branches, deadline_s, within=self)

    @property
    def tokens_left(self) -> int | None:
        """Tokens that may still be sampled; None without a limit."""
        with self._lock:
            return _finite(self._free_tokens())

    @property
    def branches_left(self) -> int | None:
        """Branches that may still be forked; None without a limit."""
        with self._lock:
            return _finite(self._free_branches())

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the first deadline; None without one, or before the first search."""
        ends = [each._deadline for each in self._nest() if each._deadline is not None]
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    # ---- for searches -------------------------------------------------------------------------

    def start(self) -> None:
        """A search begins to spend: deadlines run from the first time on."""
        now = time.monotonic()
        with self._lock:
            for each in self._nest():
                if each.deadline_s is not None and each._deadline is None:
                    each._deadline = now + each.deadline_s

    def take_branches(self, wanted: int) -> int:
        """Spend up to `wanted` branches; returns how many."""
        with self._lock:
            granted = int(min(wanted, self._free_branches()))
            for each in self._nest():
                each.spent_branches += granted
            return granted

    def reserve_tokens(self, wants: Sequence[int | None]) -> list[int | None]:
        """Reserve tokens for a batch, shared evenly; who wants less leaves it to the others.

        Args:
            wants: most tokens that each may sample; None without a limit.

        Returns:
            What each may sample, at most what it wants: None without any limit. Their sum is
            reserved until `settle`.
        """
        with self._lock:
            free = self._free_tokens()
            if math.isinf(free):
                return list(wants)
            shares = _share(int(free), [math.inf if w is None else w for w in wants])
            for each in self._nest():
                each._reserved += sum(shares)
            return list(shares)

    def settle(self, reserved: Sequence[int | None], sampled: int) -> None:
        """Tokens were sampled: spend them, and free the rest of what was reserved."""
        held = sum(n for n in reserved if n is not None)
        with self._lock:
            for each in self._nest():
                if None not in reserved:
                    assert sampled <= held, f"sampled {sampled} of {held} reserved tokens"
                    each._reserved -= held
                each.spent_tokens += sampled

    @property
    def is_reserved_by_others(self) -> bool:
        """Tokens are reserved now: some of them may come back."""
        with self._lock:
            return any(each._reserved for each in self._nest() if each.max_tokens is not None)

    # ---- inside -------------------------------------------------------------------------------

    def _nest(self) -> list[Budget]:
        nest: list[Budget] = []
        at: Budget | None = self
        while at is not None:
            nest.append(at)
            at = at.within
        return nest

    def _free_tokens(self) -> float:
        return min(
            math.inf if b.max_tokens is None else b.max_tokens - b.spent_tokens - b._reserved
            for b in self._nest()
        )

    def _free_branches(self) -> float:
        return min(
            math.inf if b.max_branches is None else b.max_branches - b.spent_branches
            for b in self._nest()
        )

    def __repr__(self) -> str:
        limits = ", ".join(
            f"{name}={getattr(self, name)}"
            for name in ("max_tokens", "max_branches", "deadline_s")
            if getattr(self, name) is not None
        )
        return f"Budget({limits}; spent {self.spent_tokens} tokens, {self.spent_branches} branches)"


def _finite(value: float) -> int | None:
    return None if math.isinf(value) else int(value)


def _share(total: int, wants: Sequence[float]) -> list[int]:
    """Split `total` evenly over `wants`, none above its own; the first get the odd ones.

    ``_share(10, [2, inf, inf]) == [2, 4, 4]``, ``_share(5, [inf, inf]) == [3, 2]``.
    """
    shares = [0] * len(wants)
    open_ = [i for i, want in enumerate(wants) if want > 0]
    while total and open_:
        each, odd = divmod(total, len(open_))
        for place, i in enumerate(open_):
            more = int(min(each + (place < odd), wants[i] - shares[i]))
            shares[i] += more
            total -= more
        open_ = [i for i in open_ if shares[i] < wants[i]]
    return shares
