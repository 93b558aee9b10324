"""Log-probabilities in vLLM's shape: one dict a token, from token id to `Logprob`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt


class TokenText(Protocol):
    """What is asked of a tokenizer here."""

    def token_text(self, token_id: int, /) -> str: ...


@dataclass(frozen=True, slots=True)
class Logprob:
    """One entry.

    Attributes:
        logprob: natural log of the token's probability.
        rank: 1 for the likeliest token of the vocabulary; None where nobody asked for ranks.
        decoded_token: the token's text, '' for an id that has none, None without a tokenizer.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """The likeliest tokens of one row, as arrays.

    Attributes:
        ids: int64 ``[n]``, likeliest first, ties by lowest id.
        logprobs: float32 ``[n]``.
        rank: of the row's sampled or given token: 1 + the number of likelier ones.
    """

    ids: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float32]
    rank: int


def logprob_dict(
    token_id: int, logprob: float, top: TopLogprobs | None, tokenizer: TokenText | None
) -> dict[int, Logprob]:
    """The dict of one position: the sampled or given token first, then the likeliest.

    Args:
        token_id: the sampled or given token.
        logprob: its log-probability.
        top: its rank and the likeliest tokens; None for neither.
        tokenizer: for texts, or None.
    """
    rank = None if top is None else top.rank
    entries = {token_id: Logprob(logprob, rank, _text(token_id, tokenizer))}
    if top is not None:
        for place, (other, value) in enumerate(
            zip(top.ids.tolist(), top.logprobs.tolist(), strict=True), 1
        ):
            if other != token_id:
                entries[other] = Logprob(value, place, _text(other, tokenizer))
    return entries


def logprob_dicts(
    entries: Iterable[tuple[int, float | None, TopLogprobs | None]], tokenizer: TokenText | None
) -> list[dict[int, Logprob] | None]:
    """One dict a position; None where the logprob is None (the first token of a prompt)."""
    return [
        None if logprob is None else logprob_dict(token_id, logprob, top, tokenizer)
        for token_id, logprob, top in entries
    ]


def _text(token_id: int, tokenizer: TokenText | None) -> str | None:
    return None if tokenizer is None else tokenizer.token_text(token_id)
