"""Rotary position embedding, non-interleaved ("rotate half"): the definition of right."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate pairs ``(i, i + D/2)`` of every head by its row's angles.

    Args:
        q: ``[T, Hq, D]``.
        k: ``[T, Hkv, D]``.
        cos: ``[T, D/2]`` float32, already gathered for the rows and scaled.
        sin: ``[T, D/2]`` float32.

    Returns:
        New tensors like ``q`` and ``k``; the inputs are not changed.
    """
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.to(torch.float32).chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)
