"""The gate of the feed-forward layer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def silu_and_mul_kernel(
    x_ptr,  # [T, 2 I]
    out_ptr,  # [T, I]
    stride_x,
    size,
    BLOCK: tl.constexpr,
):
    """BLOCK elements of one row a program."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < size
    dtype = out_ptr.dtype.element_ty
    gate = tl.load(x_ptr + row * stride_x + offs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * stride_x + size + offs, mask=mask, other=0.0).to(tl.float32)
    gate = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * size + offs, (gate * up).to(dtype), mask=mask)


def silu_and_mul(x: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``x = [gate, up]``: ``[T, 2 I] -> [T, I]``, in the dtype of ``x``."""
    num_rows, double = x.shape
    assert double % 2 == 0 and x.stride(1) == 1
    out = torch.empty(num_rows, double // 2, dtype=x.dtype, device=x.device)
    if out.numel():
        grid = (num_rows, triton.cdiv(double // 2, _BLOCK))
        silu_and_mul_kernel[grid](x, out, x.stride(0), double // 2, BLOCK=_BLOCK)
    return out
