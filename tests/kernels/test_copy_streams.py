"""Records beside the steps: every fence between the streams, with a device that is a fake."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from fake_streams import FakeCuda, FakeEvent, FakeStream, FakeTensor

from cotrt.kernels import copy_streams
from cotrt.kernels.copy_streams import CopyStreams, RecordCopy

BLOCKS, WORDS = 6, 4
NAMES = ("new_stream", "current_stream", "on_stream", "new_event", "pinned", "empty")


class Pool:
    """Blocks on a fake device: what is told is in `expected` at once and in `blocks` later."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self._copies = CopyStreams(torch.device("cuda", 0))
        self.blocks = torch.zeros(BLOCKS, WORDS, dtype=torch.int32)
        self.expected = self.blocks.clone()
        self.taken: list[tuple[RecordCopy, torch.Tensor]] = []

    def write(self, blocks: list[int], value: int) -> None:
        """The rows of a step."""
        self._cuda.compute.enqueue(lambda: self.blocks.index_fill_(0, torch.tensor(blocks), value))
        self.expected[blocks] = value

    def store(self, blocks: list[int]) -> None:
        gathered = self._cuda.empty((len(blocks), WORDS), torch.int32, torch.device("cuda", 0))
        value = gathered.value
        self._cuda.compute.enqueue(lambda: value.copy_(self.blocks[blocks]))
        self.taken.append((self._copies.to_host(gathered), self.expected[blocks].clone()))

    def load(self, blocks: list[int], value: int) -> None:
        records = np.full((len(blocks), WORDS), value, np.int32).view(np.uint8)
        there: Any = self._copies.to_device(records)
        records[:] = 0  # not kept
        source = there.value
        self._cuda.compute.enqueue(lambda: self.blocks.index_copy_(0, torch.tensor(blocks), source))
        self.expected[blocks] = value

    def look(self) -> None:
        copy, expected = self.taken.pop(0)
        assert np.array_equal(copy.wait().view(np.int32), expected.numpy()), "records are wrong"
        assert copy.seconds == 1e-3


def run_programs() -> None:
    for seed in range(20):
        run_program(seed)


def run_program(seed: int) -> None:
    """Steps that write, store and load at random, and a host that looks late or early."""
    pick, cuda = random.Random(seed), FakeCuda(seed)
    with pytest.MonkeyPatch.context() as patch:
        for name in NAMES:
            patch.setattr(copy_streams.cuda, name, getattr(cuda, name))
        pool = Pool(cuda)
        for step in range(1, 30):
            blocks = pick.sample(range(BLOCKS), pick.randint(1, 3))
            verb: Callable[..., None] = pick.choice([pool.write, pool.load, pool.store])
            verb(blocks, *([] if verb == pool.store else [step]))
            cuda.run_some()
            if pool.taken and pick.random() < 0.3:
                pool.look()
        while pool.taken:
            pool.look()
        cuda.run_all()
    assert torch.equal(pool.blocks, pool.expected), "blocks are wrong"


@pytest.mark.parametrize("seed", range(20))
def test_records_and_blocks_are_what_the_order_of_the_calls_makes_them(seed: int) -> None:
    run_program(seed)


def without_waits(is_of_compute: bool) -> Callable[..., None]:
    """`FakeStream.wait_stream` that does nothing for the compute stream, or for the others."""
    wait = FakeStream.wait_stream

    def wait_stream(self: FakeStream, other: FakeStream) -> None:
        if (self is self._cuda.compute) != is_of_compute:
            wait(self, other)

    return wait_stream


def without_records(is_of_compute: bool) -> Callable[..., None]:
    """`FakeTensor.record_stream` that forgets the compute stream, or the others."""
    record = FakeTensor.record_stream

    def record_stream(self: FakeTensor, stream: FakeStream) -> None:
        if (stream is self._cuda.compute) != is_of_compute:
            record(self, stream)

    return record_stream


def look_at_once(self: FakeEvent) -> None:
    self.is_done = True


FENCES = {
    "the copy out waits for the gather": (FakeStream, "wait_stream", without_waits(False)),
    "the scatter waits for the copy in": (FakeStream, "wait_stream", without_waits(True)),
    "gathered memory is kept for the copy out": (
        FakeTensor, "record_stream", without_records(False),
    ),
    "copied memory is kept for the scatter": (FakeTensor, "record_stream", without_records(True)),
    "the host waits for the copy out": (FakeEvent, "synchronize", look_at_once),
}  # fmt: skip


@pytest.mark.parametrize("fence", FENCES)
def test_without_a_fence_records_or_blocks_are_wrong(
    fence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, removed = FENCES[fence]
    monkeypatch.setattr(owner, name, removed)
    with pytest.raises(AssertionError, match=r"(records|blocks) are wrong"):
        run_programs()


def test_on_a_cpu_records_are_there_at_once() -> None:
    copies = CopyStreams(torch.device("cpu"))
    words = torch.arange(6, dtype=torch.int32).view(2, 3)
    copy = copies.to_host(words)
    expected = words.clone()
    words.zero_()
    records = copy.wait()
    assert np.array_equal(records.view(np.int32), expected.numpy())
    there = copies.to_device(records)
    assert torch.equal(there, expected)
