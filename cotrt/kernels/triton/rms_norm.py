"""RMS normalisation, with the residual added first."""

from __future__ import annotations

from typing import overload

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import next_power_of_2


@triton.jit
def rms_norm_kernel(
    x_ptr,  # [N, D]
    residual_ptr,  # [N, D]
    weight_ptr,  # [D]
    y_ptr,  # [N, D]
    sum_ptr,  # [N, D]
    stride_x,
    stride_residual,
    size,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row a program."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    mask = offs < size
    dtype = y_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * stride_x + offs, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * stride_residual + offs, mask=mask, other=0.0)
        rounded = (x + residual.to(tl.float32)).to(dtype)
        tl.store(sum_ptr + row * size + offs, rounded, mask=mask)
        x = rounded.to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / size + eps)
    # Rounded before the weight, as the models were trained.
    x = x.to(dtype).to(tl.float32)
    weight = tl.load(weight_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * size + offs, (x * weight).to(dtype), mask=mask)


@overload
def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: None = None) -> Tensor: ...
@overload
def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor) -> tuple[Tensor, Tensor]: ...


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """``x / rms(x) * weight`` over the last dimension, computed in float32.

    Args:
        x: ``[..., D]``.
        weight: ``[D]``.
        eps: added to the mean square.
        residual: ``[..., D]`` added to ``x`` before it is normalised, in the dtype of ``x``.

    Returns:
        ``y`` in the dtype of ``x``; with a residual, ``(y, x + residual)``.
    """
    size = x.shape[-1]
    rows = x.reshape(-1, size)
    added = rows if residual is None else residual.reshape(-1, size)
    assert weight.is_contiguous() and weight.shape == (size,)
    assert rows.stride(-1) == 1 and added.stride(-1) == 1
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = y if residual is None else torch.empty_like(y)
    if rows.numel():
        block = next_power_of_2(size)
        rms_norm_kernel[(len(rows),)](
            rows,
            added,
            weight,
            y,
            total,
            rows.stride(0),
            added.stride(0),
            size,
            eps,
            HAS_RESIDUAL=residual is not None,
            BLOCK=block,
            num_warps=num_warps_for(block),
        )
    return y if residual is None else (y, total)


def num_warps_for(block: int) -> int:
    """Warps for a program that holds ``block`` elements of a row."""
    return min(8, max(1, block // 512))
