"""Rotary position embedding, non-interleaved ("rotate half")."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import next_power_of_2


@triton.jit
def rotate_heads(
    x_ptr, out_ptr, cos, sin, stride_head, stride_out_head, num_heads, half,
    BLOCK_H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """All heads of one row: pairs ``(i, i + half)`` turned by the row's angles."""
    offs = tl.arange(0, BLOCK)
    for begin in tl.range(0, num_heads, BLOCK_H):
        head = begin + tl.arange(0, BLOCK_H)
        mask = (head < num_heads)[:, None] & (offs < half)[None, :]
        at = head[:, None] * stride_head + offs[None, :]
        first = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(x_ptr + at + half, mask=mask, other=0.0).to(tl.float32)
        to = head[:, None] * stride_out_head + offs[None, :]
        dtype = out_ptr.dtype.element_ty
        turned = first * cos[None, :] - second * sin[None, :]
        tl.store(out_ptr + to, turned.to(dtype), mask=mask)
        turned = second * cos[None, :] + first * sin[None, :]
        tl.store(out_ptr + to + half, turned.to(dtype), mask=mask)


@triton.jit
def rotary_kernel(
    q_ptr,  # [T, Hq, D]
    k_ptr,  # [T, Hkv, D]
    cos_ptr,  # [T, D / 2] float32
    sin_ptr,  # [T, D / 2] float32
    q_out_ptr,  # [T, Hq, D]
    k_out_ptr,  # [T, Hkv, D]
    stride_q_row, stride_q_head, stride_k_row, stride_k_head,
    num_q_heads, num_kv_heads, half,
    BLOCK_H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row a program: the angles are read once for all of its heads."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    cos = tl.load(cos_ptr + row * half + offs, mask=offs < half, other=0.0)
    sin = tl.load(sin_ptr + row * half + offs, mask=offs < half, other=0.0)
    size = 2 * half
    rotate_heads(
        q_ptr + row * stride_q_row, q_out_ptr + row * num_q_heads * size, cos, sin,
        stride_q_head, size, num_q_heads, half, BLOCK_H, BLOCK,
    )  # fmt: skip
    rotate_heads(
        k_ptr + row * stride_k_row, k_out_ptr + row * num_kv_heads * size, cos, sin,
        stride_k_head, size, num_kv_heads, half, BLOCK_H, BLOCK,
    )  # fmt: skip


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate pairs ``(i, i + D/2)`` of every head by its row's angles.

    Args:
        q: ``[T, Hq, D]``.
        k: ``[T, Hkv, D]``.
        cos: ``[T, D/2]`` float32, already gathered for the rows and scaled.
        sin: ``[T, D/2]`` float32.

    Returns:
        New tensors like ``q`` and ``k``; the inputs are not changed.
    """
    num_rows, num_q_heads, size = q.shape
    half = size // 2
    assert cos.shape == sin.shape == (num_rows, half) and cos.dtype == sin.dtype == torch.float32
    assert cos.is_contiguous() and sin.is_contiguous()
    assert q.stride(2) == k.stride(2) == 1
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    if num_rows:
        rotary_kernel[(num_rows,)](
            q,
            k,
            cos,
            sin,
            q_out,
            k_out,
            q.stride(0),
            q.stride(1),
            k.stride(0),
            k.stride(1),
            num_q_heads,
            k.shape[1],
            half,
            BLOCK_H=8,
            BLOCK=next_power_of_2(half),
        )
    return q_out, k_out
