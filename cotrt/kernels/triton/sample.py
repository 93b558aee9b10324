"""Draws tokens on the device: what kernels/reference/sample.py defines, in one launch.

Filters add up float32 weights where the reference has float64 ones; a token whose cumulative mass
lies within rounding of top_p may fall on the other side. All else is equal.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..reference.sample import MIN_TEMPERATURE
from .sample_kernel import sample_kernel

BLOCK = 1024
CANDIDATES = 8192

Array = npt.NDArray[Any] | Tensor


def sample(
    logits: Tensor,
    rows: Array,
    temperature: Array,
    top_k: Array,
    top_p: Array,
    min_p: Array,
    key_low: Array,
    key_high: Array,
    *,
    raw: Tensor | None = None,
    raw_rows: Array | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draws D tokens; nothing is read back, so the caller need not wait.

    Arguments but the logits are numpy arrays, copied to the device, or tensors that lie there.

    Args:
        logits: float32 ``[R, V]`` to draw from, never changed.
        rows: ``[D]`` row of each draw.
        temperature: ``[D]``; 0 is greedy.
        top_k: ``[D]``; 0 is off.
        top_p: ``[D]``; 1 is off.
        min_p: ``[D]``; 0 is off.
        key_low: ``[D]`` halves of the draws' keys, `cotrt.sampling.noise.row_keys`.
        key_high: ``[D]``.
        raw: logits ``[.., V]`` whose log-softmax is reported; those drawn from when missing.
        raw_rows: ``[D]`` rows of these.

    Returns:
        On the device: token ids int32 ``[D]`` (-1 in bad draws), logprobs float32 ``[D]`` (NaN
        there), and bad bool ``[D]``: logits that hold NaN or +inf, or leave no token possible.
    """
    device = logits.device
    raw = logits if raw is None else raw
    raw_rows = rows if raw_rows is None else raw_rows
    for tensor in (logits, raw):
        assert tensor.dtype == torch.float32 and tensor.dim() == 2 and tensor.stride(1) == 1
    assert raw.shape[1] == logits.shape[1]

    def put(values: Array, dtype: torch.dtype) -> Tensor:
        if isinstance(values, np.ndarray):
            # The bits of uint32 keys, not their values, fit an int32.
            values = values.view(np.int32) if values.dtype == np.uint32 else values
            values = torch.from_numpy(np.ascontiguousarray(values))
        return values.to(device=device, dtype=dtype).contiguous()

    heat = put(temperature, torch.float64)
    heat = torch.where(heat > 0, heat.clamp(min=MIN_TEMPERATURE), 0.0)
    count = len(heat)
    ids = torch.empty(count, dtype=torch.int32, device=device)
    logprobs = torch.empty(count, dtype=torch.float32, device=device)
    bad = torch.empty(count, dtype=torch.int8, device=device)
    if count:
        found = torch.empty(count, CANDIDATES, dtype=torch.int32, device=device)
        sample_kernel[(count,)](
            logits,
            raw,
            put(rows, torch.int32),
            put(raw_rows, torch.int32),
            heat,
            put(top_k, torch.int32),
            put(top_p, torch.float64),
            put(min_p, torch.float64),
            put(key_low, torch.int32),
            put(key_high, torch.int32),
            found,
            ids,
            logprobs,
            bad,
            logits.stride(0),
            raw.stride(0),
            logits.shape[1],
            CANDIDATES=CANDIDATES,
            BLOCK=BLOCK,
            num_warps=8,
        )
    return ids, logprobs, bad.bool()
