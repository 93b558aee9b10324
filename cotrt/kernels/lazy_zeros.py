"""Zeros that take no memory until they are written."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch


def lazy_zeros(
    shape: Sequence[int], dtype: torch.dtype, device: str | torch.device
) -> torch.Tensor:
    """Zeros of any shape; on a CPU the system hands out their pages as they are first written.

    ``torch.zeros`` writes its zeros, and so would touch a whole KV pool at start.
    """
    if torch.device(device).type != "cpu":
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    raw = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(raw).view(dtype).view(tuple(shape))
