"""Builds a native cache from the reference's through `write_kv`, garbage included."""

from __future__ import annotations

import torch

from cotrt.kernels.cpu.kv_cache import new_kv_cache
from cotrt.kernels.cpu.write_kv import write_kv


def native_caches(
    k: torch.Tensor, v: torch.Tensor, rows: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The native pair that holds what reference caches ``[blocks, heads, size, dim]`` hold."""
    num_blocks, num_kv_heads, block_size, head_dim = k.shape
    ((k_native, v_native),) = new_kv_cache(
        1, num_blocks, block_size, num_kv_heads, head_dim, k.dtype, "cpu"
    )
    k_native.fill_(torch.nan)
    v_native.fill_(torch.nan)
    flat = [c.transpose(1, 2).reshape(-1, num_kv_heads, head_dim) for c in (k, v)]
    slots = torch.arange(num_blocks * block_size)
    write_kv(flat[0], flat[1], k_native, v_native, slots)
    return k_native, v_native
