"""RMS normalisation, with the residual added first: the definition of right."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor


@overload
def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: None = None) -> Tensor: ...
@overload
def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor) -> tuple[Tensor, Tensor]: ...


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """``x / rms(x) * weight`` over the last dimension, computed in float32.

    Args:
        x: ``[..., D]``.
        weight: ``[D]``.
        eps: added to the mean square.
        residual: ``[..., D]`` added to ``x`` before it is normalised, in the dtype of ``x``.

    Returns:
        ``y`` in the dtype of ``x``; with a residual, ``(y, x + residual)``.
    """
    if residual is not None:
        x = x + residual
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    # Rounded before the weight, as the models were trained and as transformers does.
    y = weight * wide.to(x.dtype)
    return y if residual is None else (y, x)
