"""The KV pool of the Triton backend, and records of its blocks: one launch and one copy.

Blocks are head-major with the head dimension contiguous, as in the reference; records are token by
token. What moves is 32-bit words, whatever the dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from ..cuda import HostCopy, to_device
from ..reference.kv_cache import Caches, from_bytes, new_kv_cache

__all__ = ["gather_blocks", "new_kv_cache", "read_blocks", "scatter_blocks", "write_blocks"]

_WORDS = 1024  # words a program copies at a time


@triton.jit
def records_kernel(
    caches_ptr,  # [2 * layers] addresses of K and V caches
    blocks_ptr,  # [n] block ids
    records_ptr,  # [n, 2 * layers, BS, heads, row] int32 words
    num_heads,
    row_words,  # words of one head of one token
    READS: tl.constexpr,  # from the caches; else into them
    BS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """One (block, cache) a program."""
    index = tl.program_id(0).to(tl.int64)
    cache = tl.program_id(1)
    block_words = BS * num_heads * row_words
    cache_ptr = tl.load(caches_ptr + cache).to(tl.pointer_type(tl.int32))
    cache_ptr += tl.load(blocks_ptr + index).to(tl.int64) * block_words
    records_ptr += (index * tl.num_programs(1) + cache) * block_words
    for begin in tl.range(0, block_words, WORDS):
        offs = begin + tl.arange(0, WORDS)
        mask = offs < block_words
        row = offs // row_words
        head = row % num_heads
        token = row // num_heads
        at = (head * BS + token) * row_words + offs % row_words
        if READS:
            words = tl.load(cache_ptr + at, mask=mask)
            tl.store(records_ptr + offs, words, mask=mask)
        else:
            words = tl.load(records_ptr + offs, mask=mask)
            tl.store(cache_ptr + at, words, mask=mask)


def gather_blocks(caches: Caches, blocks: Sequence[int]) -> torch.Tensor:
    """Records of blocks in the plain layout, on the device, in the order of the current stream.

    Args:
        caches: one ``(k, v)`` pair a layer, as `new_kv_cache` made them.
        blocks: block ids.

    Returns:
        int32 ``[n, words]``: ``[layer][K, V][token][head][dim]`` a block.
    """
    words = _record_words(caches)
    out = torch.empty(len(blocks), words, dtype=torch.int32, device=caches[0][0].device)
    if len(blocks):
        _launch(caches, blocks, out, reads=True)
    return out


def scatter_blocks(caches: Caches, blocks: Sequence[int], records: torch.Tensor) -> None:
    """Puts records into blocks: the inverse of `gather_blocks`, in the order of the current stream.

    Args:
        caches: one ``(k, v)`` pair a layer, written in place.
        blocks: block ids, none twice.
        records: int32 ``[n, words]`` on the device.
    """
    if len(blocks):
        assert records.shape == (len(blocks), _record_words(caches)), (records.shape, len(blocks))
        _launch(caches, blocks, records, reads=False)


def read_blocks(caches: Caches, blocks: Sequence[int]) -> npt.NDArray[np.uint8]:
    """`gather_blocks` to the host, uint8 ``[n, bytes]``; waits for what was launched before."""
    (host,) = HostCopy(gather_blocks(caches, blocks)).wait()
    records: npt.NDArray[np.uint8] = host.view(torch.uint8).numpy()
    return records


def write_blocks(caches: Caches, blocks: Sequence[int], records: npt.NDArray[np.uint8]) -> None:
    """`scatter_blocks` of records on the host, uint8 ``[n, bytes]``, which are not kept."""
    if len(blocks):
        new = to_device(from_bytes(records, torch.int32), caches[0][0].device)
        scatter_blocks(caches, blocks, new)


def _record_words(caches: Caches) -> int:
    first = caches[0][0]
    num_bytes = first.stride(0) * first.element_size()
    assert num_bytes % 4 == 0, num_bytes
    return 2 * len(caches) * num_bytes // 4


def _launch(caches: Caches, blocks: Sequence[int], records: torch.Tensor, *, reads: bool) -> None:
    first = caches[0][0]
    _, heads, size, dim = first.shape
    flat = [cache for layer in caches for cache in layer]
    assert all(c.is_contiguous() and c.shape == first.shape for c in flat)
    row_bytes = dim * first.element_size()
    assert row_bytes % 4 == 0, row_bytes
    addresses = torch.tensor([c.data_ptr() for c in flat], dtype=torch.int64)
    ids = torch.tensor(blocks, dtype=torch.int32)
    records_kernel[(len(blocks), len(flat))](
        to_device(addresses, first.device),
        to_device(ids, first.device),
        records,
        heads,
        row_bytes // 4,
        READS=reads,
        BS=size,
        WORDS=_WORDS,
    )
