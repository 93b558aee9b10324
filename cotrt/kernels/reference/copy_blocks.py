"""Copies whole blocks: the write of copy-on-write."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def copy_blocks(
    caches: Sequence[tuple[torch.Tensor, torch.Tensor]], pairs: Sequence[tuple[int, int]]
) -> None:
    """Copies block ``source`` onto block ``destination`` in every layer, for every pair.

    All sources are read before any destination is written, so the order of pairs does not matter
    unless a destination is named twice (a bug of the caller).

    Args:
        caches: one ``(k, v)`` pair a layer, ``[num_blocks, ...]``, written in place.
        pairs: ``(source, destination)`` block ids.
    """
    if not pairs:
        return
    assert len({destination for _, destination in pairs}) == len(pairs), "a block copied to twice"
    device = caches[0][0].device if caches else None
    source = torch.tensor([pair[0] for pair in pairs], dtype=torch.int64, device=device)
    destination = torch.tensor([pair[1] for pair in pairs], dtype=torch.int64, device=device)
    for layer in caches:
        for cache in layer:
            cache.index_copy_(0, destination, cache.index_select(0, source))
