"""Puts the K and V of a step's rows into their packed slots."""

from __future__ import annotations

import torch
from torch import Tensor

from .kv_cache import CacheShape
from .native import dtype_of, module
from .rms_norm import rms_norm
from .rotary import rotary


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
    """The head norms, ``rotary`` and ``write_kv``, as in the reference, one after the other."""
    if q_weight is not None and k_weight is not None:
        q, k = rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)
    q, k = rotary(q, k, cos, sin)
    write_kv(k, v, k_cache, v_cache, slot_mapping)
    return q
