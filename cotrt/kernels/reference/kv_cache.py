"""The KV pool of the reference backend: its block layout, and nothing else."""

from __future__ import annotations

import torch

from ..lazy_zeros import lazy_zeros


def new_kv_cache(
    num_layers: int,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: str | torch.device,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Makes one ``(k, v)`` pair of zeros a layer.

    Both are ``[num_blocks, num_kv_heads, block_size, head_dim]``: the rows of one head of a block
    lie together, so that a run of blocks is gathered in long pieces. Zeros are lazy on a CPU: the
    operating system hands out a page of memory when it is first written.

    Args:
        num_layers: layers of the model.
        num_blocks: blocks of the pool, each ``block_size`` tokens.
        block_size: tokens a block.
        num_kv_heads: KV heads of a layer.
        head_dim: elements a head.
        dtype: float32, bfloat16 or float16.
        device: where the pool lives.
    """
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    return [
        (
            lazy_zeros(shape, dtype, device),
            lazy_zeros(shape, dtype, device),
        )
        for _ in range(num_layers)
    ]
