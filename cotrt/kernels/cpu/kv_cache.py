"""The KV pool of the native backend, in the layout that its tiles read as stored.

A *step* is what one lane takes at a time: a pair of bfloat16, or one float32.

    K  [num_blocks, num_kv_heads, block_size / lanes, head_dim / step, lanes, step]
    V  [num_blocks, num_kv_heads, block_size / step, head_dim, step]

with 16 lanes (8 in blocks of 8): tokens lie across the lanes of K, head dims across those of V.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..lazy_zeros import lazy_zeros
from ..reference.kv_cache import from_bytes, to_bytes
from .native import compute_dtype

Caches = Sequence[tuple[Tensor, Tensor]]

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


def read_blocks(caches: Caches, blocks: Sequence[int]) -> npt.NDArray[np.uint8]:
    """Records of blocks in the plain layout.

    These are torch operations, and each gives the GIL away; a step that moves no block calls none.

    Args:
        caches: one ``(k, v)`` pair a layer, as `new_kv_cache` made them.
        blocks: block ids.

    Returns:
        uint8 ``[n, bytes]``: ``[layer][K, V][token][head][dim]`` a block.
    """
    shape = CacheShape.of(*caches[0])
    index = torch.tensor(blocks, dtype=torch.int64)
    sizes = (len(blocks), len(caches), 2, shape.block_size, shape.num_kv_heads, shape.head_dim)
    out = torch.empty(sizes, dtype=caches[0][0].dtype)
    for layer, (k_cache, v_cache) in enumerate(caches):
        k = k_cache.index_select(0, index)  # [n, head, run, pair, lane, step]
        out[:, layer, 0].view(_k_tokens(k)).copy_(k.permute(0, 2, 4, 1, 3, 5))
        v = v_cache.index_select(0, index)  # [n, head, pair of tokens, dim, step]
        out[:, layer, 1].view(_v_tokens(v)).copy_(v.permute(0, 2, 4, 1, 3))
    return to_bytes(out)


def write_blocks(caches: Caches, blocks: Sequence[int], records: npt.NDArray[np.uint8]) -> None:
    """Puts records into blocks: the inverse of `read_blocks`.

    Args:
        caches: one ``(k, v)`` pair a layer, written in place.
        blocks: block ids, none twice.
        records: uint8 ``[n, bytes]``.
    """
    shape = CacheShape.of(*caches[0])
    index = torch.tensor(blocks, dtype=torch.int64)
    new = from_bytes(records, caches[0][0].dtype).view(
        len(blocks), len(caches), 2, shape.block_size, shape.num_kv_heads, shape.head_dim
    )
    for layer, (k_cache, v_cache) in enumerate(caches):
        k = new[:, layer, 0].view(_k_tokens(k_cache[: len(blocks)]))
        k_cache.index_copy_(0, index, k.permute(0, 3, 1, 4, 2, 5))
        v = new[:, layer, 1].view(_v_tokens(v_cache[: len(blocks)]))
        v_cache.index_copy_(0, index, v.permute(0, 3, 1, 4, 2))


def _k_tokens(k: Tensor) -> tuple[int, ...]:
    """Sizes of K by token: ``[n, run, lane, head, pair, step]``."""
    count, heads, runs, pairs, lanes, step = k.shape
    return count, runs, lanes, heads, pairs, step


def _v_tokens(v: Tensor) -> tuple[int, ...]:
    """Sizes of V by token: ``[n, pair of tokens, step, head, dim]``."""
    count, heads, pairs, dim, step = v.shape
    return count, pairs, step, heads, dim


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
