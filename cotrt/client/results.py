"""Results as a server tells of them, as the values that local work gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cotrt.outputs import CompletionOutput, Score

if TYPE_CHECKING:
    from cotrt.sampling.logprobs import Logprob


def completion_of(found: Mapping[str, Any]) -> CompletionOutput:
    """The output of a generate."""
    logprobs = found["logprobs"]
    if logprobs is not None:
        logprobs = logprobs_of(logprobs)
    return CompletionOutput(**{**found, "logprobs": logprobs})


def logprobs_of(found: Sequence[Mapping[str, Any]]) -> list[dict[int, Logprob]]:
    """One dict a token, from token id to `Logprob`."""
    from cotrt.sampling.logprobs import Logprob

    return [{int(k): Logprob(**v) for k, v in each.items()} for each in found]


def score_of(found: Mapping[str, Any]) -> Score:
    """The score of one continuation."""
    return Score(list(found["token_ids"]), list(found["logprobs"]))
