"""Puts the K and V of a step's rows into their slots."""

from __future__ import annotations

import torch


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Writes row ``t`` of ``k`` and ``v`` to slot ``slot_mapping[t]``; -1 skips the row.

    Args:
        k: ``[T, num_kv_heads, head_dim]``, the cache's dtype or one that is cast to it.
        v: like ``k``.
        k_cache: ``[num_blocks, num_kv_heads, block_size, head_dim]``, written in place.
        v_cache: like ``k_cache``.
        slot_mapping: int64 ``[T]``, ``block_id * block_size + offset`` or -1; distinct slots.
    """
    _, num_kv_heads, block_size, head_dim = k_cache.shape
    if bool((slot_mapping < 0).any()):
        kept = (slot_mapping >= 0).nonzero().squeeze(1)
        k, v, slot_mapping = k[kept], v[kept], slot_mapping[kept]
    # One row index for every (token, head): the cache seen as rows of head_dim elements.
    block = torch.div(slot_mapping, block_size, rounding_mode="floor")
    first = block * (num_kv_heads * block_size) + slot_mapping % block_size
    heads = torch.arange(num_kv_heads, device=slot_mapping.device) * block_size
    rows = (first[:, None] + heads).flatten()
    for new, cache in ((k, k_cache), (v, v_cache)):
        flat = cache.view(-1, head_dim)
        flat.index_copy_(0, rows, new.reshape(-1, head_dim).to(cache.dtype))
