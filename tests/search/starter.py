"""The starter model, where it is on this machine."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cotrt import LLM

# What bfloat16 does to this model, from docs/kernels.md ("int8 weights"; the same on AVX-512 and
# AMX, less on AVX2). How far the logprob of a token moves from float32's: the mean of the absolute
# change, and its 99th percentile. In what part of the positions the likeliest token stays.
MEAN_ERROR, ERROR_OF_99_PERCENT, SAME_LIKELIEST = 0.013, 0.066, 0.991

# Nats between the two likeliest tokens at which another batch may choose the other one: both
# logprobs may have moved in both batches. Gaps of 0.004 to 0.06 were met.
NEAR_TIE = 2 * 2 * ERROR_OF_99_PERCENT


def assert_apart_by_rounding(some: Sequence[float], others: Sequence[float]) -> None:
    """Logprobs of one path, computed in two batches, differ as bfloat16 lets them.

    Both are rounded, so the mean difference is at most twice the mean error; in a short path a
    single token may be far out. In at most 2% of the tokens one of the two is beyond its 99th
    percentile; three standard deviations of that count come on top. The largest difference of 4,140
    tokens was 0.195 on AMX and 0.15 on AVX-512. One beyond 0.53 is another token's.
    """
    apart = [abs(a - b) for a, b in zip(some, others, strict=True)]
    assert sum(apart) < 2 * (MEAN_ERROR * len(apart) + ERROR_OF_99_PERCENT), apart
    expected = 0.02 * len(apart)
    far = sum(each > 2 * ERROR_OF_99_PERCENT for each in apart)
    assert far <= expected + 3 * math.sqrt(expected), apart
    assert max(apart) < 8 * ERROR_OF_99_PERCENT, apart


def least_equal(num_texts: int, num_tokens: int) -> float:
    """How many greedy texts are the same in two batches, less three standard deviations.

    A text stays where the likeliest token stays at every position, in both batches.
    """
    share = SAME_LIKELIEST ** (2 * num_tokens)
    return num_texts * share - 3 * math.sqrt(num_texts * share * (1 - share))


@functools.cache
def _is_here() -> bool:
    home = Path(os.environ.get("COTRT_HOME", "~/.cache/cotrt")).expanduser()
    return any(home.glob("**/*.safetensors"))


def starter_llm(**options: Any) -> LLM:
    """The starter model; the test is skipped where it would have to be fetched first."""
    if not _is_here():
        pytest.skip("the starter model is not on this machine")
    return LLM("smollm2-135m", **{"seed": 1, "kv_cache_memory_bytes": 2**28} | options)
