"""A model that logs and checks every row it is asked for."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from path_kv import HashedPaths, hash_after

from cotrt.plan import KVShape, StepPlan, UInt8
from cotrt.testing import ScriptedModel

VOCAB, EOS = 12, 0


@lru_cache(maxsize=1 << 16)
def _probs(path: tuple[int, ...]) -> dict[int, float]:
    word = hash(path) & ((1 << 62) - 1)
    return {token: 1.0 + (word >> 4 * token & 15) for token in range(VOCAB)}


def probs(path: Sequence[int]) -> dict[int, float]:
    """Next-token weights that depend on every token of `path`."""
    return _probs(tuple(path))


def logprob(path: Sequence[int], token: int) -> float:
    """What the model gives `token` after `path`."""
    weights = probs(path)
    return math.log(weights[token] / sum(weights.values()))


class LoggedModel(ScriptedModel):
    """A ScriptedModel that remembers every (path, token) it computed.

    Its KV depends on the whole path (`path_kv`), which is checked wherever it is read.

    Attributes:
        computed: paths of the rows whose KV was written; known: those of KV that an earlier model
            has computed.
        num_rows: rows of all steps; num_logits_rows: logits rows of all steps.
        expected: called before a step runs; gives the path that each row has to see.
        in_flight: called, in order, while a step is running, once the model has run.
        fail: raised by the next step, in place of running it.
        room: rows of the largest step that there is memory for: a larger one writes half of its
            rows and raises. None: any number.
        no_room_to_copy: the next copy raises MemoryError and copies nothing.
        num_shortages: how often one of the two happened.
        logs: whether it does what its name says; if not, its KV is the token ids alone.
    """

    kv_bytes_per_token = 8
    kv_shape = KVShape(1, 2, 1, 1, "int32")

    def __init__(self, next_probs: Callable[[list[int]], Any] = probs, **options: Any) -> None:
        options = {"vocab_size": VOCAB, "eos_token_id": EOS, **options}
        super().__init__(next_probs, **options)
        self.computed: set[tuple[int, ...]] = set()
        self.known: set[tuple[int, ...]] = set()
        self.num_rows = 0
        self.num_logits_rows = 0
        self.steps: list[StepPlan] = []
        self.expected: Callable[[], list[list[int]]] | None = None
        self.on_load: Callable[[int], None] | None = None
        self.in_flight: collections.deque[Callable[[], Any]] = collections.deque()
        self.fail: BaseException | None = None
        self.broken: BaseException | None = None
        self.room: int | None = None
        self.no_room_to_copy = False
        self.num_shortages = 0
        self.logs = True
        self._hashes = np.zeros((0, 0), np.uint32)

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        super().allocate_kv(num_blocks, block_size)
        self._hashes = np.zeros((num_blocks, block_size), np.uint32)

    def contents(self) -> npt.NDArray[np.int32]:
        """``[num_blocks, 2 * block_size]``: of each block its token ids, and their hashes."""
        return np.concatenate([self._kv, self._hashes.view(np.int32)], axis=1)

    def read_blocks(self, blocks: Sequence[int]) -> UInt8:
        at = list(blocks)
        held = np.concatenate([self._kv[at], self._hashes[at].view(np.int32)], axis=1)
        return held.view(np.uint8)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        if self.no_room_to_copy:
            self.no_room_to_copy = False
            self.num_shortages += 1
            raise MemoryError("made to fail: no memory for a copy")
        self._copy(pairs)

    def write_blocks(self, blocks: Sequence[int], records: UInt8) -> None:
        for block in blocks:
            if self.on_load is not None:
                self.on_load(block)
        self._put(blocks, records)

    def _copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        sources, destinations = map(list, zip(*pairs))
        self._kv[destinations] = self._kv[sources]
        self._hashes[destinations] = self._hashes[sources]

    def _put(self, blocks: Sequence[int], records: UInt8) -> None:
        held = np.ascontiguousarray(records).view(np.int32)
        self._kv[list(blocks)], hashes = np.hsplit(held, 2)
        self._hashes[list(blocks)] = hashes.view(np.uint32)

    def run(self, step: StepPlan) -> torch.Tensor:
        if self.room is not None and len(step.input_ids) > self.room:
            self.num_shortages += 1
            some = np.flatnonzero(step.slot_mapping >= 0)[: len(step.input_ids) // 2]
            self._kv.reshape(-1)[step.slot_mapping[some]] = step.input_ids[some]
            self._run_in_flight()
            raise torch.OutOfMemoryError(f"made to fail: {len(step.input_ids)} rows")
        if self.fail is not None:
            error, self.fail = self.fail, None
            self._run_in_flight()
            raise error
        try:
            logits = self._run(step)
            self._run_in_flight()
        except Exception as error:  # the engine would take it for a model's failure
            self.broken = error
            raise
        return logits

    def _run_in_flight(self) -> None:
        while self.in_flight:
            self.in_flight.popleft()()

    def _run(self, step: StepPlan) -> torch.Tensor:
        logits = super().run(step)
        self.num_rows += len(step.input_ids)
        self.num_logits_rows += len(step.logits_rows)
        self.steps.append(step)
        if not self.logs:
            return logits
        paths = self._computed(step)
        expected = self.expected() if self.expected is not None else None
        for row, slot in enumerate(step.slot_mapping.tolist()):
            path = paths.of(row)
            if expected is not None:
                assert path == expected[row], (
                    f"row {row} sees {path}, its branch is {expected[row]}"
                )
            if slot >= 0:
                self.computed.add(tuple(path))
            else:
                assert tuple(path) in self.computed or tuple(path) in self.known, (
                    f"row {row} was never computed: {path}"
                )
        return logits

    def _computed(self, step: StepPlan) -> HashedPaths:
        """What the rows of a step see, whose token ids are written: now their hashes are too."""
        paths, hashes = (
            HashedPaths(step.attention, self._kv, self._hashes),
            self._hashes.reshape(-1),
        )
        slots, ids = step.slot_mapping.tolist(), step.input_ids.tolist()
        for row in np.argsort(step.positions, kind="stable").tolist():
            if slots[row] >= 0:
                hashes[slots[row]] = hash_after(paths.hash_before(row), ids[row])
        return paths
