"""What the host does with a CUDA device: which one is current, graphs, streams, copies back.

Everything here is a plain call on a CPU, so that the same code runs in Triton's interpreter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

_cuda: Any = torch.cuda  # some of it has no types


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Makes a CUDA device current, which is where Triton launches; nothing for a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def new_stream(device: torch.device) -> Any:
    """A stream of a CUDA device beside the others."""
    return _cuda.Stream(device)


def current_stream(device: torch.device) -> Any:
    """The stream of a CUDA device that this thread launches on."""
    return _cuda.current_stream(device)


def on_stream(stream: Any) -> contextlib.AbstractContextManager[Any]:
    """Launches go to `stream`, and memory that is made is of it."""
    manager: contextlib.AbstractContextManager[Any] = _cuda.stream(stream)
    return manager


def new_event() -> Any:
    """A CUDA event that takes the time."""
    return _cuda.Event(enable_timing=True)


def pinned(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Page-locked host memory, which copies to and from a CUDA device may be behind in."""
    return torch.empty(shape, dtype=dtype, pin_memory=True)


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory of the current stream, not written."""
    return torch.empty(shape, dtype=dtype, device=device)


class Graph(Protocol):
    """Launches that were recorded once."""

    def replay(self) -> None:
        """Do them all again, in the order of the current stream, on the same memory."""


class GraphMaker(Protocol):
    """Records launches; `CudaGraphMaker`, and a fake one in the tests."""

    def capture(self, call: Callable[[], None]) -> Graph:
        """Run `call` once to warm it up, then record what it launches."""

    def clear(self) -> None:
        """All graphs are gone: what is recorded from now on has memory of its own."""


class CudaGraphMaker:
    """CUDA graphs that share one memory pool: they are replayed one at a time.

    Args:
        device: of all that is captured.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = _cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, call: Callable[[], None]) -> Graph:
        """Run `call` once on a side stream (kernels compile, cuBLAS loads), then record it."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            call()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads of the program may use the GPU meanwhile.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            call()
        return graph

    def clear(self) -> None:
        """Take a new pool: torch gives the old one back when the last of its graphs is gone."""
        self._pool = torch.cuda.graph_pool_handle()


class HostCopy:
    """Tensors on their way to the host: started now, waited for later.

    The pinned memory is the copy's own, and the event behind it is recorded on the stream that is
    current now. Nothing of the device is held back by it.

    Args:
        tensors: any shapes and dtypes; on a CPU they are cloned at once.
    """

    def __init__(self, *tensors: Tensor) -> None:
        self._event: Any = None
        if not tensors or tensors[0].device.type != "cuda":
            self._host = [tensor.clone() for tensor in tensors]
            return
        self._host = [
            torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors
        ]
        for host, tensor in zip(self._host, tensors, strict=True):
            host.copy_(tensor, non_blocking=True)
        self._event = _cuda.Event()
        self._event.record(torch.cuda.current_stream(tensors[0].device))

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> list[Tensor]:
        """The tensors on the host, in the order in which they were given."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._host


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """A host tensor on the device, in the order of the current stream, not waited for."""
    if device.type != "cuda":
        return host.to(device)
    # torch hands pinned memory out again only when the copies from it are done.
    return host.pin_memory().to(device, non_blocking=True)
