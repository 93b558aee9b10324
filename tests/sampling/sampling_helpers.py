"""Batches in one line, and a sampler written the slow and plain way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cotrt.sampling.noise import gumbel, noise_bits, row_keys
from cotrt.sampling.processors import LogitsProcessor
from cotrt.sampling.sampler import SamplingBatch


def make_batch(
    num_draws: int,
    *,
    rows: Sequence[int] | None = None,
    temperature: Any = 1.0,
    top_k: Any = 0,
    top_p: Any = 1.0,
    min_p: Any = 0.0,
    seeds: Any = 0,
    epochs: Any = 0,
    positions: Any = 0,
    processors: Sequence[LogitsProcessor | None] | None = None,
    num_logprobs: Any = -1,
    processed_logprobs: bool = False,
) -> SamplingBatch:
    """Scalars are for all draws; rows are 0, 1, 2, ... when not given."""

    def spread(value: Any, dtype: Any) -> np.ndarray:
        return np.broadcast_to(np.asarray(value, dtype), (num_draws,)).copy()

    return SamplingBatch(
        sample_rows=spread(np.arange(num_draws) if rows is None else rows, np.int32),
        temperature=spread(temperature, np.float32),
        top_k=spread(top_k, np.int32),
        top_p=spread(top_p, np.float32),
        min_p=spread(min_p, np.float32),
        seeds=spread(seeds, np.uint64),
        epochs=spread(epochs, np.uint32),
        positions=spread(positions, np.int64),
        processors=processors,
        num_logprobs=spread(num_logprobs, np.int32),
        processed_logprobs=processed_logprobs,
    )


def kept_by_filters(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[np.ndarray, np.ndarray]:
    """Ids that survive, likeliest first, and their logits / temperature (largest at 0)."""
    order = np.argsort(-logits, kind="stable")
    order = order[logits[order] > -np.inf]
    scaled = (logits[order].astype(np.float64) - logits.max()) / temperature
    if top_k:
        order, scaled = order[:top_k], scaled[:top_k]
    weights = np.exp(scaled)
    if top_p < 1:
        before = np.cumsum(weights) - weights
        size = max(1, int((before < top_p * weights.sum()).sum()))
        order, scaled, weights = order[:size], scaled[:size], weights[:size]
    keep = weights >= min_p * weights[0]
    return order[keep], scaled[keep]


def plain_sample(logits: np.ndarray, batch: SamplingBatch, draw: int) -> int:
    """One draw by the definition."""
    row = logits[batch.sample_rows[draw]]
    if batch.temperature[draw] == 0:
        return int(row.argmax())
    ids, scaled = kept_by_filters(
        row,
        float(batch.temperature[draw]),
        int(batch.top_k[draw]),
        float(batch.top_p[draw]),
        float(batch.min_p[draw]),
    )
    low, high = row_keys(batch.seeds[[draw]], batch.epochs[[draw]], batch.positions[[draw]])
    scores = scaled + gumbel(noise_bits(low, high, ids))
    return int(ids[scores == scores.max()].min())


class WordTokenizer:
    """A token is a word of the list, special ones in <>; ids past its end have no text."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)
        self.all_special_ids = frozenset(
            i for i, word in enumerate(words) if word.startswith("<") and word.endswith(">")
        )

    def encode_continuation(self, text: str, *, special: bool = True) -> list[int]:
        ids = []
        while text:
            word = max((w for w in self.words if text.startswith(w)), key=len)
            ids.append(self.words.index(word))
            text = text[len(word) :]
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        kept = [i for i in ids if not (skip_special_tokens and i in self.all_special_ids)]
        return "".join(self.words[i] for i in kept if i < len(self.words))

    def token_text(self, token_id: int) -> str:
        return self.decode([token_id])


class ByteTokenizer:
    """A token is a byte; 256 and up are special tokens <256>, <257>, ..."""

    all_special_ids = frozenset(range(256, 260))

    def __init__(self) -> None:
        self.num_decoded = 0

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        self.num_decoded += len(ids)
        pieces = []
        for token_id in ids:
            if token_id < 256:
                pieces.append(bytes([token_id]))
            elif token_id in self.all_special_ids and not skip_special_tokens:
                pieces.append(f"<{token_id}>".encode())
        return b"".join(pieces).decode(errors="replace")
