"""Copies whole blocks: the write of copy-on-write, for all layers in one native call."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .native import module


def copy_blocks(caches: Sequence[tuple[Tensor, Tensor]], pairs: Sequence[tuple[int, int]]) -> None:
    """Copies block ``source`` onto block ``destination`` in every layer, for every pair.

    All sources are as they were before the call.

    Args:
        caches: one ``(k, v)`` pair a layer, ``[num_blocks, ...]``, written in place.
        pairs: ``(source, destination)`` block ids, no destination twice.
    """
    if not pairs or not caches:
        return
    destinations = {destination for _, destination in pairs}
    assert len(destinations) == len(pairs), "a block copied to twice"
    num_blocks = len(caches[0][0])
    assert all(0 <= block < num_blocks for pair in pairs for block in pair), (pairs, num_blocks)
    if any(source in destinations for source, _ in pairs):  # a chain: read before it is written
        from ..reference.copy_blocks import copy_blocks as in_two_steps

        in_two_steps(caches, pairs)
        return
    tensors = [tensor for layer in caches for tensor in layer]
    assert all(tensor.is_contiguous() and len(tensor) == num_blocks for tensor in tensors)
    native = [(t.data_ptr(), t.stride(0) * t.itemsize) for t in tensors]
    module().copy_blocks(native, [(int(a), int(b)) for a, b in pairs])
