"""How long device work takes: CUDA graphs and events on a GPU, the wall clock elsewhere."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

_COPY_BYTES = 1 << 30


class Timer:
    """Times calls on one device.

    Args:
        device: a CUDA device, or the CPU, where calls are interpreted and times mean nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_gpu = device.type == "cuda"

    def synchronize(self) -> None:
        """Wait for all that was launched."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def launched(self, call: Callable[[], Any], *, inner: int = 10, repeats: int = 7) -> float:
        """Seconds of a call's device work alone: the median of graphs of `inner` calls each.

        Host time of the launches, which may be more, is not in it.
        """
        if not self.on_gpu:
            return self.wall(call, repeats=1)
        cuda: Any = torch.cuda
        stream = cuda.Stream(self.device)
        stream.wait_stream(cuda.current_stream())
        with cuda.stream(stream):
            call()
            call()
        cuda.current_stream().wait_stream(stream)
        graph = cuda.CUDAGraph()
        with cuda.graph(graph, stream=stream):
            for _ in range(inner):
                call()
        graph.replay()
        return self.events(graph.replay, repeats=repeats) / inner

    def events(self, call: Callable[[], Any], *, repeats: int = 7) -> float:
        """Seconds between events around a call: the median."""
        if not self.on_gpu:
            return self.wall(call, repeats=1)
        cuda: Any = torch.cuda
        times: list[float] = []
        for _ in range(repeats):
            start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e-3)
        return statistics.median(times)

    def wall(self, call: Callable[[], Any], *, repeats: int = 5) -> float:
        """Seconds of a call and all that it launched: the median."""
        times = []
        for _ in range(repeats):
            self.synchronize()
            start = time.perf_counter()
            call()
            self.synchronize()
            times.append(time.perf_counter() - start)
        return statistics.median(times)


def give_back(timer: Timer) -> None:
    """Memory of what is gone, cycles included, goes back to the GPU."""
    gc.collect()
    if timer.on_gpu:
        torch.cuda.empty_cache()


def memory_bandwidth(timer: Timer) -> float:
    """Bytes a second that the device moves: the better of a copy and of a sum over one buffer."""
    size = _COPY_BYTES if timer.on_gpu else 1 << 20
    source = torch.ones(size // 4, device=timer.device)
    target = torch.empty_like(source)
    copied = 2 * size / timer.launched(lambda: target.copy_(source), inner=4)
    read = size / timer.launched(source.sum, inner=4)
    return max(copied, read)
