"""CUDA streams, events and memory that is handed out again, played by queues on the host.

Operations of a stream run in their order, at random moments relative to other streams. Memory that
is dropped is overwritten in the order of the stream that it was made on, behind whatever streams it
was recorded on: what torch's caching allocator promises, at its least favourable.
"""

from __future__ import annotations

import collections
import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

POISON = -(1 << 20)


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self.is_done = False

    def record(self, stream: FakeStream) -> None:
        stream.enqueue(lambda: setattr(self, "is_done", True))

    def synchronize(self) -> None:
        while not self.is_done:
            self._cuda.run_one()

    def elapsed_time(self, other: FakeEvent) -> float:
        return 1.0


class FakeStream:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self.operations: collections.deque[tuple[Callable[[], Any], list[FakeEvent]]] = (
            collections.deque()
        )
        cuda.streams.append(self)

    def enqueue(self, call: Callable[[], Any], after: Sequence[FakeEvent] = ()) -> None:
        self.operations.append((call, list(after)))

    def tail(self) -> FakeEvent:
        """Done when all is that was enqueued so far."""
        event = FakeEvent(self._cuda)
        event.record(self)
        return event

    def wait_stream(self, other: FakeStream) -> None:
        self.enqueue(lambda: None, [other.tail()])


class FakeTensor:
    """Memory of a fake device. `value` may be touched by operations of its streams alone."""

    def __init__(self, cuda: FakeCuda, shape: Sequence[int], dtype: torch.dtype) -> None:
        self._cuda = cuda
        self._stream = cuda.current
        self._others: set[FakeStream] = set()
        self.value = torch.empty(tuple(shape), dtype=dtype)
        self.shape, self.dtype = self.value.shape, dtype
        value = self.value
        self._stream.enqueue(lambda: value.fill_(POISON))  # what was there before

    def record_stream(self, stream: FakeStream) -> None:
        self._others.add(stream)

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> None:
        value = self.value
        self._cuda.current.enqueue(lambda: value.copy_(source))
        assert non_blocking

    def __del__(self) -> None:
        value = self.value
        after = [stream.tail() for stream in self._others]
        self._stream.enqueue(lambda: value.fill_(POISON), after)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        """``host.copy_(fake, non_blocking=True)``."""
        assert function is torch.Tensor.copy_ and kwargs == {"non_blocking": True}
        host, fake = args
        value = fake.value
        fake._cuda.current.enqueue(lambda: host.copy_(value))


class FakeCuda:
    """What `cotrt.kernels.cuda` offers of a device, all of it late.

    Attributes:
        current: the stream that launches go to; at first the compute stream.
    """

    def __init__(self, seed: int) -> None:
        self._pick = random.Random(seed)
        self.streams: list[FakeStream] = []
        self.compute = self.current = FakeStream(self)

    def run_one(self) -> None:
        """The next operation of a stream at random, of those that wait for nothing."""
        ready = [
            stream.operations
            for stream in self.streams
            if stream.operations and all(event.is_done for event in stream.operations[0][1])
        ]
        assert ready, "every stream waits for another"
        call, _ = self._pick.choice(ready).popleft()
        call()

    def run_some(self) -> None:
        for _ in range(self._pick.randrange(4)):
            if any(stream.operations for stream in self.streams):
                self.run_one()

    def run_all(self) -> None:
        while any(stream.operations for stream in self.streams):
            self.run_one()

    # ---- in place of functions of cotrt.kernels.cuda ------------------------------------------

    def new_stream(self, device: torch.device) -> FakeStream:
        return FakeStream(self)

    def current_stream(self, device: torch.device) -> FakeStream:
        return self.current

    @contextlib.contextmanager
    def on_stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def new_event(self) -> FakeEvent:
        return FakeEvent(self)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.full(tuple(shape), POISON, dtype=dtype)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> FakeTensor:
        return FakeTensor(self, shape, dtype)
