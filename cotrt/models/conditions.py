"""What decides the last bits of KV besides the model: named where bits are promised."""

from __future__ import annotations

import contextlib
import platform
from pathlib import Path

import torch

import cotrt


def conditions(backend_name: str, device: str, block_size: int) -> str:
    """The conditions under which equal tokens give equal bits (docs/determinism.md), in words.

    Args:
        backend_name: of the kernels: ``cpu``, ``reference`` or ``triton``.
        device: that the model runs on, as in `load`.
        block_size: tokens a KV block.
    """
    named = [f"cotrt {cotrt.__version__}"]
    if backend_name == "triton":
        import triton

        # A block size is a constant of the compiled kernels.
        named += [f"torch {torch.__version__}", f"triton {triton.__version__}"]
        named.append(f"blocks of {block_size}")
    else:
        # Its cosines are those of the native kernels too.
        named.append(f"torch {torch.__version__} {torch.backends.cpu.get_cpu_capability()}")
        if backend_name == "cpu":
            from ..kernels.cpu.native import build_mark, isa

            named.append(f"{isa()} kernels {build_mark()}")
        else:
            named.append(f"{backend_name} kernels, {torch.get_num_threads()} threads")
    on_gpu = torch.device(device).type == "cuda"
    named.append(torch.cuda.get_device_name(device) if on_gpu else cpu_name())
    return ", ".join(named)


def cpu_name() -> str:
    """The model of this machine's CPU, as far as the system says it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
