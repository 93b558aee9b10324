"""The noise of a draw, in numpy: the definition that every backend's kernel equals bit for bit.

A draw is keyed by (seed, epoch, position) and nothing else. Token i of it gets 32 bits, of which
the top 23 make a uniform number in (0, 1), exact in float32, and that makes Gumbel noise, which is
bounded: from -log(24 log 2) = -2.81 to 24 log 2 = 16.64. The token with the largest logit /
temperature + noise is a sample of the softmax.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

UInt32 = npt.NDArray[np.uint32]
Float64 = npt.NDArray[np.float64]

MAX_GUMBEL = 16.6356

# Multipliers and shifts of the 32-bit hash. GOLDEN spreads neighbouring ids over the range.
GOLDEN, MULTIPLY_1, MULTIPLY_2 = 0x9E3779B9, 0x7FEB352D, 0x846CA68B


def row_keys(
    seeds: npt.NDArray[np.uint64], epochs: UInt32, positions: npt.NDArray[np.int64]
) -> tuple[UInt32, UInt32]:
    """The two 32-bit halves (low, high) of each draw's key: ``[S]`` each."""
    with np.errstate(over="ignore"):
        key = _mix64(seeds.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15))
        key = _mix64(key + epochs.astype(np.uint64) * np.uint64(0xD6E8FEB86659FD93))
        key = _mix64(key + positions.astype(np.uint64) * np.uint64(0xA0761D6478BD642F))
    return key.astype(np.uint32), (key >> np.uint64(32)).astype(np.uint32)


def noise_bits(low: UInt32, high: UInt32, ids: npt.NDArray[np.integer]) -> UInt32:
    """32 random bits for each token id; ``low``, ``high`` and ``ids`` broadcast.

    All arithmetic wraps at 32 bits and all shifts fill with zeros.
    """
    with np.errstate(over="ignore"):
        bits = ids.astype(np.uint32) * np.uint32(GOLDEN) + low
        bits = (bits ^ (bits >> np.uint32(16))) * np.uint32(MULTIPLY_1)
        bits = (bits ^ (bits >> np.uint32(15)) ^ high) * np.uint32(MULTIPLY_2)
        bits = bits ^ (bits >> np.uint32(16))
    return np.asarray(bits, np.uint32)


def uniform(bits: UInt32) -> npt.NDArray[np.float32]:
    """``((bits >> 9) + 0.5) / 2^23``: in (0, 1), exact in float32."""
    numbers = (bits >> np.uint32(9)).astype(np.float32)
    return (numbers + np.float32(0.5)) * np.float32(2.0**-23)


def gumbel(bits: UInt32) -> Float64:
    """Gumbel noise of the bits, in float64."""
    return np.asarray(-np.log(-np.log(uniform(bits).astype(np.float64))), np.float64)


def _mix64(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
