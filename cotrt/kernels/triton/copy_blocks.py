"""Copies whole blocks in every layer: the write of copy-on-write, in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ..cuda import to_device
from ..reference.copy_blocks import copy_blocks as _copy_through_a_buffer

_WORDS = 1024  # int32 words a program copies at a time


@triton.jit
def copy_blocks_kernel(
    caches_ptr,  # [2 * layers] addresses of K and V caches
    pairs_ptr,  # [pairs, 2] source and destination block ids
    block_words,  # int32 words a block
    WORDS: tl.constexpr,
):
    """One (pair, cache) a program; blocks are copied as words, whatever their dtype."""
    pair = tl.program_id(0)
    cache_ptr = tl.load(caches_ptr + tl.program_id(1)).to(tl.pointer_type(tl.int32))
    source = tl.load(pairs_ptr + 2 * pair).to(tl.int64) * block_words
    destination = tl.load(pairs_ptr + 2 * pair + 1).to(tl.int64) * block_words
    for begin in tl.range(0, block_words, WORDS):
        offs = begin + tl.arange(0, WORDS)
        mask = offs < block_words
        words = tl.load(cache_ptr + source + offs, mask=mask)
        tl.store(cache_ptr + destination + offs, words, mask=mask)


def copy_blocks(
    caches: Sequence[tuple[torch.Tensor, torch.Tensor]], pairs: Sequence[tuple[int, int]]
) -> None:
    """Copies block ``source`` onto block ``destination`` in every layer, for every pair.

    Pairs that read what another pair writes are as right as others, but go through a buffer.

    Args:
        caches: one ``(k, v)`` pair a layer, ``[num_blocks, ...]``, written in place.
        pairs: ``(source, destination)`` block ids.
    """
    if not pairs or not caches:
        return
    destinations = {destination for _, destination in pairs}
    assert len(destinations) == len(pairs), "a block copied to twice"
    if any(source in destinations for source, _ in pairs):
        _copy_through_a_buffer(caches, pairs)
        return
    first = caches[0][0]
    flat = [cache for layer in caches for cache in layer]
    assert all(c.is_contiguous() and c.shape == first.shape for c in flat)
    block_bytes = first.stride(0) * first.element_size()
    assert block_bytes % 16 == 0, block_bytes
    addresses = torch.tensor([c.data_ptr() for c in flat], dtype=torch.int64)
    addresses = to_device(addresses, first.device)
    ids = to_device(torch.tensor(pairs, dtype=torch.int32), first.device)
    copy_blocks_kernel[(len(pairs), len(flat))](addresses, ids, block_bytes // 4, WORDS=_WORDS)
