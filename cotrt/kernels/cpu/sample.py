"""Draws tokens natively: what kernels/reference/sample.py defines, one row at a time, no sorting.

Filters cut by the bits of float32 weights where the reference has float64 sums; a token whose
cumulative mass lies within rounding of top_p may fall on the other side. All else is equal.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .native import module

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]


def sample(
    logits: Tensor,
    rows: Int32,
    temperature: Float32,
    top_k: Int32,
    top_p: Float32,
    min_p: Float32,
    key_low: npt.NDArray[np.uint32],
    key_high: npt.NDArray[np.uint32],
    *,
    raw: Tensor | None = None,
    raw_rows: Int32 | None = None,
) -> tuple[Int32, Float32, npt.NDArray[np.bool_]]:
    """Draws D tokens.

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
        token ids ``[D]`` (-1 in bad draws), logprobs ``[D]`` (NaN there), and bad ``[D]``: logits
        that hold NaN or +inf, or leave no token possible.
    """
    raw = logits if raw is None else raw
    raw_rows = rows if raw_rows is None else raw_rows
    for tensor, index in ((logits, rows), (raw, raw_rows)):
        assert tensor.dtype == torch.float32 and tensor.is_contiguous() and tensor.dim() == 2
        assert not len(index) or 0 <= index.min() <= index.max() < len(tensor)
    assert raw.shape[1] == logits.shape[1]
    count = len(rows)
    ids, logprobs = np.empty(count, np.int32), np.empty(count, np.float32)
    bad = np.empty(count, np.bool_)

    def array(values: npt.NDArray[Any], dtype: type[np.generic]) -> npt.NDArray[Any]:
        return np.ascontiguousarray(values, dtype)

    if count:
        module().sample(
            logits.data_ptr(), raw.data_ptr(), logits.shape[1], array(rows, np.int32),
            array(raw_rows, np.int32), array(temperature, np.float32), array(top_k, np.int32),
            array(top_p, np.float32), array(min_p, np.float32), array(key_low, np.uint32),
            array(key_high, np.uint32), ids.ctypes.data, logprobs.ctypes.data, bad.ctypes.data,
        )  # fmt: skip
    return ids, logprobs, bad
