"""Copies of records between a device and the host beside its steps: a stream a direction.

    compute   ... gather │ rows of the step ............ │ scatter │ rows of the step ...
    out                  └> copy to pinned memory ─> host (an event)
    in                          copy from pinned memory ─┘

On a CPU everything happens at once, so that the same code runs in Triton's interpreter.
"""

from __future__ import annotations

import time
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from . import cuda
from .reference.kv_cache import from_bytes


class RecordCopy:
    """Records on their way to the host.

    Attributes:
        seconds: what the copy took of its stream, once it was waited for.
    """

    def __init__(self, host: Tensor, began: Any = None, ended: Any = None) -> None:
        self._host = host
        self._began, self._ended = began, ended
        self.seconds = 0.0

    def wait(self) -> npt.NDArray[Any]:
        """uint8 ``[n, bytes]``, once the bytes are there."""
        if self._ended is not None:
            self._ended.synchronize()
            self.seconds = self._began.elapsed_time(self._ended) / 1000
            self._began = self._ended = None
        records: npt.NDArray[Any] = self._host.view(torch.uint8).numpy()
        return records


class CopyStreams:
    """The streams of one device, made when the first record moves.

    Two, so that what a step loads never waits for what it stores. Call it with the device current
    and its compute stream the current stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out: Any = None
        self._in: Any = None

    def to_host(self, gathered: Tensor) -> RecordCopy:
        """Start to copy what the compute stream has been told to gather.

        Args:
            gathered: ``[n, words]`` on the device, for nobody else; it may be dropped at once.
        """
        if self._device.type != "cuda":
            began = time.perf_counter()
            copy = RecordCopy(gathered.clone())
            copy.seconds = time.perf_counter() - began
            return copy
        if self._out is None:
            self._out = cuda.new_stream(self._device)
        host = cuda.pinned(gathered.shape, gathered.dtype)
        start, ended = cuda.new_event(), cuda.new_event()
        self._out.wait_stream(cuda.current_stream(self._device))  # for the gather
        with cuda.on_stream(self._out):
            start.record(self._out)
            host.copy_(gathered, non_blocking=True)
            ended.record(self._out)
        # The gathered records' memory is of the compute stream, which may take it again only when
        # they are copied.
        gathered.record_stream(self._out)
        return RecordCopy(host, start, ended)

    def to_device(self, records: npt.NDArray[Any]) -> Tensor:
        """Records on the device, for what the compute stream is told from now on.

        Args:
            records: uint8 ``[n, bytes]``; not kept.

        Returns:
            int32 ``[n, words]``.
        """
        host = from_bytes(records, torch.int32)
        if self._device.type != "cuda":
            return host.to(self._device)
        if self._in is None:
            self._in = cuda.new_stream(self._device)
        compute = cuda.current_stream(self._device)
        pinned = cuda.pinned(host.shape, host.dtype)
        pinned.copy_(host)
        with cuda.on_stream(self._in):
            there = cuda.empty(host.shape, host.dtype, self._device)
            # torch hands the pinned memory out again only when this copy is done.
            there.copy_(pinned, non_blocking=True)
        compute.wait_stream(self._in)  # the scatter comes behind the copy
        # The memory is of the stream that copies, which may take it again only after the scatter.
        there.record_stream(compute)
        return there
