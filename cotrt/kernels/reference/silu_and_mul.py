"""The gate of the feed-forward layer: the definition of right."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_and_mul(x: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``x = [gate, up]``: ``[T, 2 I] -> [T, I]``, in the dtype of ``x``."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up
