"""Puts the K and V of a step's rows into their packed slots."""

from __future__ import annotations

import torch
from torch import Tensor

from .kv_cache import CacheShape
from .native import dtype_of, module


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Writes row ``t`` of ``k`` and ``v`` to slot ``slot_mapping[t]``; -1 skips the row.

    Args:
        k: ``[T, num_kv_heads, head_dim]``, the cache's dtype or one that is cast to it.
        v: like ``k``.
        k_cache: of `new_kv_cache`, written in place.
        v_cache: its partner.
        slot_mapping: int64 ``[T]``, ``block_id * block_size + offset`` or -1; distinct slots.
    """
    shape = CacheShape.of(k_cache, v_cache)
    num_rows = len(slot_mapping)
    assert k.shape == v.shape == (num_rows, shape.num_kv_heads, shape.head_dim), (k.shape, v.shape)
    assert slot_mapping.dtype == torch.int64
    if not num_rows:
        return
    assert int(slot_mapping.max()) < shape.num_blocks * shape.block_size, "slot outside the cache"
    k, v = k.to(k_cache.dtype).contiguous(), v.to(v_cache.dtype).contiguous()
    slots = slot_mapping.contiguous()
    module().write_kv(
        dtype_of(k), k.data_ptr(), v.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(),
        slots.data_ptr(), num_rows, shape.num_kv_heads, shape.head_dim, shape.block_size,
    )  # fmt: skip
