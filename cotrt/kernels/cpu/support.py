"""What these kernels can serve."""

from __future__ import annotations

import torch

from .native import missing_reason


def refusal(device: str, dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
    """Why the native kernels cannot serve these; None where they can."""
    if not device.startswith("cpu"):
        return f"they run on the CPU, not on {device}"
    reason = missing_reason()
    if reason is not None:
        return reason
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"they know float32, bfloat16 and float16, not {dtype}"
    if head_dim % 16 or not 16 <= head_dim <= 256:
        return f"head_dim {head_dim} is not a multiple of 16 up to 256"
    if block_size & (block_size - 1) or not 8 <= block_size <= 256:
        return f"block_size {block_size} is not a power of two from 8 to 256"
    return None
