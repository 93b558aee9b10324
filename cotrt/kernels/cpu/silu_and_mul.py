"""``silu(gate) * up`` in one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from ..reference import silu_and_mul as reference
from .native import dtype_of, module


def silu_and_mul(x: Tensor) -> Tensor:
    """``[T, 2 I]`` (gate, then up) -> ``[T, I]``; computed in float32."""
    if x.dtype not in (torch.float32, torch.bfloat16):
        return reference.silu_and_mul(x)
    x = x.contiguous()
    rows, width = x.shape
    out = torch.empty((rows, width // 2), dtype=x.dtype)
    if rows:
        module().silu_mul(x.data_ptr(), out.data_ptr(), dtype_of(x), width // 2, rows)
    return out
