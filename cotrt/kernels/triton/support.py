"""Whether the Triton kernels can serve a device, dtype and shape; imports no Triton."""

from __future__ import annotations

import importlib.util
import os

import torch

HEAD_DIMS = (64, 80, 96, 128, 256)
BLOCK_SIZES = (8, 16, 32, 64, 128, 256)


def in_interpreter() -> bool:
    """Whether Triton runs kernels in its interpreter, on the CPU, slowly and for tests only."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


def refusal(device: str, dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
    """One sentence that says why these kernels cannot serve; None where they can.

    Args:
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:1"``.
        dtype: of weights and KV.
        head_dim: elements a head.
        block_size: tokens a block.
    """
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:  # a folder of that name is not the package
        return "the package triton is not installed (pip install triton)"
    if not in_interpreter():
        if not device.startswith("cuda"):
            return f"they run on a CUDA device, not on {device!r}"
        if not torch.cuda.is_available():
            return "no CUDA device is available"
        major, minor = torch.cuda.get_device_capability(device)
        if major < 8:
            return f"they need compute capability 8.0 or later, and this device has {major}.{minor}"
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"they are written for float16, bfloat16 and float32, not {dtype}"
    if head_dim not in HEAD_DIMS:
        return f"head_dim {head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}"
    if block_size not in BLOCK_SIZES:
        return f"block_size {block_size} is not one of {', '.join(map(str, BLOCK_SIZES))}"
    return None
