"""How much work may be under way at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cotrt.server.errors import ApiError


class Admission:
    """Counts outputs from admission to end; what is too much now gets a 429, what is ever a 400.

    Args:
        max_running: outputs that the engine runs at once.
        max_queue: outputs that may wait besides.

    Attributes:
        num_admitted: outputs under way.
    """

    def __init__(self, max_running: int, max_queue: int) -> None:
        self._limit = max_running + max_queue
        self.num_admitted = 0
        self.is_draining = False

    @contextmanager
    def admit(self, num_outputs: int) -> Iterator[None]:
        """Hold places for `num_outputs`.

        Raises:
            ApiError: 400 for more than could ever be admitted, 429 for more than now, 503 while
                the server shuts down.
        """
        ticket = self.take(num_outputs)
        try:
            yield
        finally:
            ticket.release()

    def take(self, num_outputs: int) -> Ticket:
        """`admit` for work that outlives the call."""
        self.check(num_outputs)
        self.num_admitted += num_outputs
        return Ticket(self, num_outputs)

    def check(self, num_outputs: int) -> None:
        if self.is_draining:
            raise ApiError(
                503,
                "the server is shutting down",
                code="shutting_down",
                headers={"retry-after": "5", "connection": "close"},
            )
        if num_outputs > self._limit:
            raise ApiError(
                400,
                f"{num_outputs} outputs in one request: the server admits {self._limit} in all; "
                "ask for fewer",
            )
        if self.num_admitted + num_outputs > self._limit:
            raise ApiError(
                429,
                f"{self.num_admitted} outputs are under way and {self._limit} is the limit: "
                "try again later",
                code="queue_full",
                headers={"retry-after": "1"},
            )


class Ticket:
    """Places that are held until `release`, which may be called more than once."""

    def __init__(self, admission: Admission, num_outputs: int) -> None:
        self._admission = admission
        self._num_outputs = num_outputs

    def release(self) -> None:
        self._admission.num_admitted -= self._num_outputs
        self._num_outputs = 0
