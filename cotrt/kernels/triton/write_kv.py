"""Puts the K and V of a step's rows into their slots; fused with norms and rotary, or alone."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import next_power_of_2


@triton.jit
def write_kv_kernel(
    k_ptr,  # [T, Hkv, D]
    v_ptr,  # [T, Hkv, D]
    k_cache_ptr,  # [num_blocks, Hkv, BS, D]
    v_cache_ptr,  # like k_cache
    slots_ptr,  # [T] int64, -1: skip
    stride_k_row, stride_k_head, stride_v_row, stride_v_head,
    stride_block, stride_head, stride_token,
    num_heads, size,
    BS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row a program."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    if slot >= 0:
        target = (slot // BS) * stride_block + (slot % BS) * stride_token
        offs = tl.arange(0, BLOCK)
        for begin in tl.range(0, num_heads, BLOCK_H):
            head = begin + tl.arange(0, BLOCK_H)
            mask = (head < num_heads)[:, None] & (offs < size)[None, :]
            to = target + head[:, None] * stride_head + offs[None, :]
            at = row * stride_k_row + head[:, None] * stride_k_head + offs[None, :]
            k = tl.load(k_ptr + at, mask=mask, other=0.0)
            tl.store(k_cache_ptr + to, k.to(k_cache_ptr.dtype.element_ty), mask=mask)
            at = row * stride_v_row + head[:, None] * stride_v_head + offs[None, :]
            v = tl.load(v_ptr + at, mask=mask, other=0.0)
            tl.store(v_cache_ptr + to, v.to(v_cache_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _norm_rotate(
    x_ptr, weight_ptr, cos, sin, head, num_heads, half, eps, stride_head,
    HAS_NORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Both halves of some heads of a row, normalised and turned, float32 ``[BLOCK_H, BLOCK]``."""
    offs = tl.arange(0, BLOCK)
    dtype = x_ptr.dtype.element_ty
    mask = (head < num_heads)[:, None] & (offs < half)[None, :]
    at = head[:, None] * stride_head + offs[None, :]
    first = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + at + half, mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        square = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        factor = tl.rsqrt(square / (2 * half) + eps)[:, None]
        weight = tl.load(weight_ptr + offs, mask=offs < half, other=0.0).to(tl.float32)
        first = (first * factor).to(dtype).to(tl.float32) * weight[None, :]
        weight = tl.load(weight_ptr + half + offs, mask=offs < half, other=0.0).to(tl.float32)
        second = (second * factor).to(dtype).to(tl.float32) * weight[None, :]
        # Rounded as they would be between two kernels.
        first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
    turned = first * cos[None, :] - second * sin[None, :]
    return turned, second * cos[None, :] + first * sin[None, :], mask


@triton.jit
def norm_rotary_write_kernel(
    q_ptr,  # [T, Hq, D]
    k_ptr,  # [T, Hkv, D]
    v_ptr,  # [T, Hkv, D]
    q_weight_ptr,  # [D]
    k_weight_ptr,  # [D]
    cos_ptr,  # [T, D / 2] float32
    sin_ptr,  # [T, D / 2] float32
    q_out_ptr,  # [T, Hq, D]
    k_cache_ptr,  # [num_blocks, Hkv, BS, D]
    v_cache_ptr,  # like k_cache
    slots_ptr,  # [T] int64, -1: skip
    stride_q_row, stride_q_head, stride_k_row, stride_k_head, stride_v_row, stride_v_head,
    stride_block, stride_head, stride_token,
    num_q_heads, num_kv_heads, half, eps,
    HAS_NORM: tl.constexpr, BS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row a program: K goes from the projection to its slot and nowhere else."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    in_half = offs < half
    cos = tl.load(cos_ptr + row * half + offs, mask=in_half, other=0.0)
    sin = tl.load(sin_ptr + row * half + offs, mask=in_half, other=0.0)
    for begin in tl.range(0, num_q_heads, BLOCK_H):
        head = begin + tl.arange(0, BLOCK_H)
        first, second, mask = _norm_rotate(
            q_ptr + row * stride_q_row, q_weight_ptr, cos, sin, head, num_q_heads, half, eps,
            stride_q_head, HAS_NORM, BLOCK,
        )  # fmt: skip
        to = (row * num_q_heads + head[:, None]) * (2 * half) + offs[None, :]
        tl.store(q_out_ptr + to, first.to(q_out_ptr.dtype.element_ty), mask=mask)
        tl.store(q_out_ptr + to + half, second.to(q_out_ptr.dtype.element_ty), mask=mask)
    slot = tl.load(slots_ptr + row)
    if slot >= 0:
        target = (slot // BS) * stride_block + (slot % BS) * stride_token
        dtype = k_cache_ptr.dtype.element_ty
        for begin in tl.range(0, num_kv_heads, BLOCK_H):
            head = begin + tl.arange(0, BLOCK_H)
            first, second, mask = _norm_rotate(
                k_ptr + row * stride_k_row, k_weight_ptr, cos, sin, head, num_kv_heads, half,
                eps, stride_k_head, HAS_NORM, BLOCK,
            )  # fmt: skip
            to = target + head[:, None] * stride_head + offs[None, :]
            tl.store(k_cache_ptr + to, first.to(dtype), mask=mask)
            tl.store(k_cache_ptr + to + half, second.to(dtype), mask=mask)
            at = row * stride_v_row + head[:, None] * stride_v_head + offs[None, :]
            v = tl.load(v_ptr + at, mask=mask, other=0.0)
            tl.store(v_cache_ptr + to, v.to(dtype), mask=mask)
            v = tl.load(v_ptr + at + half, mask=mask, other=0.0)
            tl.store(v_cache_ptr + to + half, v.to(dtype), mask=mask)


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Writes row ``t`` of ``k`` and ``v`` to slot ``slot_mapping[t]``; -1 skips the row.

    Args:
        k: ``[T, num_kv_heads, head_dim]``, the cache's dtype or one that is cast to it.
        v: like ``k``.
        k_cache: ``[num_blocks, num_kv_heads, block_size, head_dim]``, written in place.
        v_cache: like ``k_cache``.
        slot_mapping: int64 ``[T]``, ``block_id * block_size + offset`` or -1; distinct slots.
    """
    num_rows, num_heads, size = k.shape
    _check_cache(k_cache, v_cache, slot_mapping, num_rows)
    assert k.stride(2) == v.stride(2) == 1
    if not num_rows:
        return
    write_kv_kernel[(num_rows,)](
        k,
        v,
        k_cache,
        v_cache,
        slot_mapping,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        num_heads,
        size,
        BS=k_cache.shape[2],
        BLOCK_H=8,
        BLOCK=next_power_of_2(size),
    )


def norm_rotary_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """The head norms (where a model has them), ``rotary`` and ``write_kv`` in one launch.

    Args:
        q: ``[T, Hq, D]``, straight from the projection; ``k`` and ``v`` ``[T, Hkv, D]`` too.
        k: see ``q``.
        v: see ``q``.
        cos: ``[T, D/2]`` float32; ``sin`` alike.
        sin: see ``cos``.
        k_cache: ``[num_blocks, Hkv, block_size, D]``, written in place; ``v_cache`` alike.
        v_cache: see ``k_cache``.
        slot_mapping: int64 ``[T]``, -1 skips the row's K and V.
        q_weight: ``[D]`` of the norm of query heads, or None; ``k_weight`` alike.
        k_weight: see ``q_weight``.
        eps: of the norms.

    Returns:
        The queries, normalised and turned: ``[T, Hq, D]``, contiguous.
    """
    num_rows, num_q_heads, size = q.shape
    _check_cache(k_cache, v_cache, slot_mapping, num_rows)
    assert (q_weight is None) == (k_weight is None)
    assert q.stride(2) == k.stride(2) == v.stride(2) == 1
    assert cos.is_contiguous() and sin.is_contiguous()
    assert cos.shape == sin.shape == (num_rows, size // 2)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not num_rows:
        return out
    norm_rotary_write_kernel[(num_rows,)](
        q,
        k,
        v,
        q if q_weight is None else q_weight,
        k if k_weight is None else k_weight,
        cos,
        sin,
        out,
        k_cache,
        v_cache,
        slot_mapping,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        num_q_heads,
        k.shape[1],
        size // 2,
        eps,
        HAS_NORM=q_weight is not None,
        BS=k_cache.shape[2],
        BLOCK_H=8,
        BLOCK=next_power_of_2(size // 2),
    )
    return out


def _check_cache(k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, num_rows: int) -> None:
    assert k_cache.stride() == v_cache.stride() and k_cache.stride(3) == 1
    assert slot_mapping.dtype == torch.int64 and slot_mapping.shape == (num_rows,)
