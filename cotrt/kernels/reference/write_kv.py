"""Puts the K and V of a step's rows into their slots."""

from __future__ import annotations

import torch

from .rms_norm import rms_norm
from .rotary import rotary


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


def norm_rotary_write_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """The head norms (where a model has them), then `rotary`, then `write_kv`.

    Args:
        q: ``[T, Hq, D]``, straight from the projection; ``k`` and ``v`` ``[T, Hkv, D]`` too.
        k: see ``q``.
        v: see ``q``.
        cos: ``[T, D/2]`` float32; ``sin`` alike.
        sin: see ``cos``.
        k_cache: of `new_kv_cache`, written in place; ``v_cache`` is its partner.
        v_cache: see ``k_cache``.
        slot_mapping: int64 ``[T]``, -1 skips the row's K and V.
        q_weight: ``[D]`` of the norm of query heads, or None; ``k_weight`` alike.
        k_weight: see ``q_weight``.
        eps: of the norms.

    Returns:
        The queries, normalised and turned: ``[T, Hq, D]``.
    """
    if q_weight is not None and k_weight is not None:
        q, k = rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)
    q, k = rotary(q, k, cos, sin)
    write_kv(k, v, k_cache, v_cache, slot_mapping)
    return q
