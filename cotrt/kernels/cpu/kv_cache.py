"""The KV pool of the native backend, in the layout that its tiles read as stored.

A *step* is what one lane takes at a time: a pair of bfloat16, or one float32.

    K  [num_blocks, num_kv_heads, block_size / lanes, head_dim / step, lanes, step]
    V  [num_blocks, num_kv_heads, block_size / step, head_dim, step]

with 16 lanes (8 in blocks of 8): tokens lie across the lanes of K, head dims across those of V.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..lazy_zeros import lazy_zeros
from .native import compute_dtype

LANES = 16


def new_kv_cache(
    num_layers: int,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: str | torch.device,
) -> list[tuple[Tensor, Tensor]]:
    """Makes one ``(k, v)`` pair of zeros a layer, handed out by the system as they fill.

    Args:
        num_layers: layers of the model.
        num_blocks: blocks of the pool.
        block_size: tokens a block, a power of two from 8 to 256.
        num_kv_heads: KV heads of a layer.
        head_dim: elements a head, a multiple of 16 up to 256.
        dtype: float32 or bfloat16; float16 is stored as float32.
        device: the CPU.
    """
    dtype = compute_dtype(dtype)
    step, lanes = _step(dtype), min(block_size, LANES)
    k_shape = (num_blocks, num_kv_heads, block_size // lanes, head_dim // step, lanes, step)
    v_shape = (num_blocks, num_kv_heads, block_size // step, head_dim, step)
    return [
        (
            lazy_zeros(k_shape, dtype, device),
            lazy_zeros(v_shape, dtype, device),
        )
        for _ in range(num_layers)
    ]


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What a pair of cache tensors holds."""

    num_blocks: int
    num_kv_heads: int
    block_size: int
    head_dim: int

    @classmethod
    def of(cls, k_cache: Tensor, v_cache: Tensor) -> CacheShape:
        num_blocks, num_kv_heads, runs, steps, lanes, step = k_cache.shape
        shape = cls(num_blocks, num_kv_heads, runs * lanes, steps * step)
        expected = (num_blocks, num_kv_heads, shape.block_size // step, shape.head_dim, step)
        assert v_cache.shape == expected, (k_cache.shape, v_cache.shape)
        assert k_cache.is_contiguous() and v_cache.is_contiguous()
        assert k_cache.dtype == v_cache.dtype and step == _step(k_cache.dtype)
        return shape


def _step(dtype: torch.dtype) -> int:
    return 1 if dtype == torch.float32 else 2
