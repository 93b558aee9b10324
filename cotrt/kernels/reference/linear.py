"""A linear layer: the definition of right."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x [T, N] @ weight [M, N].T + bias [M] -> [T, M]``, in the dtype of ``x``."""
    return F.linear(x, weight, bias)
