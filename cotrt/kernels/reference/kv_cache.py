"""The KV pool of the reference backend: its block layout, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from ..lazy_zeros import lazy_zeros

Caches = Sequence[tuple[torch.Tensor, torch.Tensor]]


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


def read_blocks(caches: Caches, blocks: Sequence[int]) -> npt.NDArray[np.uint8]:
    """Records of blocks in the plain layout, gathered on the device and copied to the host once.

    Args:
        caches: one ``(k, v)`` pair a layer, as `new_kv_cache` made them.
        blocks: block ids.

    Returns:
        uint8 ``[n, bytes]``: ``[layer][K, V][token][head][dim]`` a block.
    """
    first = caches[0][0]
    _, heads, size, dim = first.shape
    index = torch.tensor(blocks, dtype=torch.int64, device=first.device)
    shape = (len(blocks), len(caches), 2, size, heads, dim)
    out = torch.empty(shape, dtype=first.dtype, device=first.device)
    for layer, pair in enumerate(caches):
        for kind, cache in enumerate(pair):
            out[:, layer, kind] = cache.index_select(0, index).transpose(1, 2)
    return to_bytes(out)


def write_blocks(caches: Caches, blocks: Sequence[int], records: npt.NDArray[np.uint8]) -> None:
    """Puts records into blocks: the inverse of `read_blocks`.

    Args:
        caches: one ``(k, v)`` pair a layer, written in place.
        blocks: block ids, none twice.
        records: uint8 ``[n, bytes]``.
    """
    first = caches[0][0]
    _, heads, size, dim = first.shape
    index = torch.tensor(blocks, dtype=torch.int64, device=first.device)
    shape = (len(blocks), len(caches), 2, size, heads, dim)
    new = from_bytes(records, first.dtype).to(first.device).view(shape)
    for layer, pair in enumerate(caches):
        for kind, cache in enumerate(pair):
            cache.index_copy_(0, index, new[:, layer, kind].transpose(1, 2))


def to_bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """The bytes of a contiguous tensor, ``[len(tensor), bytes of an item]``, on the host."""
    rows = tensor.cpu().view(len(tensor), -1).view(torch.uint8)
    out: npt.NDArray[np.uint8] = rows.numpy()
    return out


def from_bytes(records: npt.NDArray[np.uint8], dtype: torch.dtype) -> torch.Tensor:
    """A tensor ``[n, elements]`` over the bytes of ``[n, bytes]``, on the host."""
    records = np.ascontiguousarray(records)
    if not records.flags.writeable:  # torch has no tensors that cannot be written
        records = records.copy()
    return torch.from_numpy(records).view(dtype)
