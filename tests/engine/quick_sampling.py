"""What random programs draw and score with to go faster: as the engine's own, for a few tokens.

The engine's own cuts a vocabulary into blocks, which takes it longer than all else in a step where
there are twelve tokens. Programs whose sampler is the engine's are run too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
from late_device import present
from logged_model import LoggedModel

from cotrt.kernels.cpu import native
from cotrt.sampling import sampler

_token_logprobs = sampler.token_logprobs


def quick_token_logprobs(
    logits: Any, rows: torch.Tensor, token_ids: torch.Tensor, num_logprobs: np.ndarray
) -> tuple[np.ndarray, dict[int, sampler.TopLogprobs]]:
    """As `cotrt.sampling.sampler.token_logprobs`, by sorting every row."""
    logits = present(logits)
    if not isinstance(logits, torch.Tensor):
        return _token_logprobs(logits, rows, token_ids, num_logprobs)
    values = logits.numpy()[rows.numpy()]
    with np.errstate(invalid="ignore"):
        most = values.max(axis=1, keepdims=True, initial=-np.inf)
        wide = (values - most).astype(np.float64)
        logprobs = (wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))).astype(np.float32)
    ids = token_ids.numpy()
    top = {}
    for draw in np.flatnonzero(num_logprobs >= 0).tolist():
        row = values[draw]
        best = np.argsort(-row, kind="stable")[: num_logprobs[draw]]
        best = best[row[best] > -np.inf]
        rank = 1 + int((row > row[ids[draw]]).sum())
        top[draw] = sampler.TopLogprobs(best, logprobs[draw, best], rank)
    return logprobs[np.arange(len(ids)), ids], top


@contextlib.contextmanager
def quickly() -> Iterator[None]:
    """Programs draw natively, where that is built, and score as above."""
    name = "cpu" if native.missing_reason() is None else LoggedModel.backend_name
    with (
        mock.patch.object(LoggedModel, "backend_name", name),
        mock.patch.object(sampler, "token_logprobs", quick_token_logprobs),
    ):
        yield
