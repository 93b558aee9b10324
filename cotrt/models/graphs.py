"""Decode steps as CUDA graphs: recorded once a batch bucket, replayed over static buffers.

A step of T rows that all have logits is replayed by the graph of the smallest bucket that holds it:

    inputs    slots, positions, ids: one buffer, one copy a step; rows past T have slot -1
    plan      the backend's work list on the device, with its counts: rows past T are in no group
    logits    one buffer for all graphs, read up to row T

Rows past T compute on what lies in their inputs, and nobody reads them. Every other step (a prompt,
a plan beyond the work list's capacity) runs eagerly.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ..kernels.cuda import Graph, GraphMaker
from ..plan import AttentionPlan, StepPlan


class GraphPlan(Protocol):
    """A work list that stays where it is; `cotrt.kernels.triton.tree_attention.GraphPlan`."""

    @property
    def tiles(self) -> tuple[int, ...]:
        """The variants of the kernels that a graph may be recorded with, by rising tile."""

    def tile_for(self, plan: AttentionPlan) -> int | None:
        """The variant for a plan; None where it does not fit the buffers."""

    def set_tile(self, tile: int) -> None:
        """Choose the variant of what is recorded next."""

    def write(self, plan: AttentionPlan, tile: int) -> None:
        """Put a plan that fits in place of the last one."""


class Forward(Protocol):
    """The layers and the head, as `Decoder.forward`."""

    def __call__(
        self,
        ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        plan: Any,
        rows: Tensor | None,
        *,
        out: Tensor | None = None,
    ) -> Tensor: ...


def bucket_sizes(max_rows: int) -> list[int]:
    """1, 2, 4, then every multiple of 8, and the largest itself."""
    sizes = [size for size in (1, 2, 4, *range(8, max_rows, 8)) if size < max_rows]
    return [*sizes, max_rows]


class StepGraphs:
    """The graphs of one decoder and what they read and write.

    Laws: a replay reads the buffers made here, weights and KV, and nothing else; `run` never
    allocates on the device.

    Args:
        forward: of the decoder.
        plan: the work list, for as many rows as the largest bucket.
        maker: records and replays.
        max_rows: sequences that run at once.
        vocab_size: columns of the logits.
        device: where all of it lives.

    Attributes:
        buckets: rows that graphs are recorded for, ascending.
        num_replays: steps that were replayed.
        num_eager: steps that `run` declined.
    """

    def __init__(
        self,
        forward: Forward,
        plan: GraphPlan,
        maker: GraphMaker,
        *,
        max_rows: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self.buckets = bucket_sizes(max_rows)
        self.num_replays = 0
        self.num_eager = 0
        self._forward = forward
        self._plan = plan
        self._maker = maker
        self._max_rows = max_rows
        self._graphs: dict[tuple[int, int], Graph] = {}
        with torch.inference_mode():
            self._inputs = torch.zeros(4 * max_rows, dtype=torch.int32, device=device)
            self._slots, self._positions, self._ids = _parts(self._inputs, max_rows)
            self._slots.fill_(-1)
            self._logits = torch.zeros(max_rows, vocab_size, device=device)

    @property
    def keys(self) -> list[tuple[int, int]]:
        """``(bucket, tile)`` of every graph, in the order in which they are recorded.

        Large ones first, so that the others find room in their memory. A single row has no use
        for a large tile.
        """
        tiles = self._plan.tiles
        return [
            (bucket, tile)
            for bucket in reversed(self.buckets)
            for tile in (tiles if bucket > 1 else tiles[:1])
        ]

    def capture(self, keys: list[tuple[int, int]] | None = None) -> None:
        """Record all graphs, or some: again whenever KV or weights have moved."""
        with torch.inference_mode():
            for bucket, tile in self.keys if keys is None else keys:
                self._plan.set_tile(tile)
                self._graphs[bucket, tile] = self._maker.capture(self._call(bucket))

    def clear(self) -> None:
        """Forget the graphs and give their memory back."""
        self._graphs.clear()
        self._maker.clear()

    def _call(self, bucket: int) -> Callable[[], None]:
        def call() -> None:
            self._forward(
                self._ids[:bucket],
                self._positions[:bucket],
                self._slots[:bucket],
                self._plan,
                None,
                out=self._logits[:bucket],
            )

        return call

    def run(self, step: StepPlan, input_ids: Tensor | None = None) -> Tensor | None:
        """Replay a step.

        Args:
            step: any.
            input_ids: ``[T]`` on the device, in place of the step's.

        Returns:
            Float32 ``[T, vocab_size]``, valid until the next replay; None where no graph serves.
        """
        key = self._key(step)
        graph = None if key is None else self._graphs.get(key)
        if key is None or graph is None:
            self.num_eager += 1
            return None
        self._plan.write(step.attention, key[1])
        self._write(step, input_ids)
        graph.replay()
        self.num_replays += 1
        return self._logits[: len(step.positions)]

    def _key(self, step: StepPlan) -> tuple[int, int] | None:
        num_rows = len(step.positions)
        if not 0 < num_rows <= self._max_rows or len(step.logits_rows) != num_rows:
            return None
        if not bool((np.diff(step.logits_rows) > 0).all()):
            return None
        tile = self._plan.tile_for(step.attention)
        if tile is None:
            return None
        return self.buckets[bisect.bisect_left(self.buckets, num_rows)], tile

    def _write(self, step: StepPlan, input_ids: Tensor | None) -> None:
        """The step's inputs in one copy, rows past it with slot -1."""
        on_gpu = self._inputs.device.type == "cuda"
        # Pinned memory is fresh each time: torch gives it out again only when the copy is done.
        host = torch.zeros(len(self._inputs), dtype=torch.int32, pin_memory=on_gpu)
        slots, positions, ids = (part.numpy() for part in _parts(host, self._max_rows))
        num_rows = len(step.positions)
        slots[:num_rows] = step.slot_mapping
        slots[num_rows:] = -1
        positions[:num_rows] = step.positions
        if input_ids is None:
            ids[:num_rows] = step.input_ids
            self._inputs.copy_(host, non_blocking=on_gpu)
        else:
            end = 3 * self._max_rows
            self._inputs[:end].copy_(host[:end], non_blocking=on_gpu)
            torch.clamp(input_ids, min=0, out=self._ids[:num_rows])  # a bad draw's is -1


def _parts(inputs: Tensor, max_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Slots (int64), positions and ids within the buffer of inputs."""
    return (
        inputs[: 2 * max_rows].view(torch.int64),
        inputs[2 * max_rows : 3 * max_rows],
        inputs[3 * max_rows :],
    )
