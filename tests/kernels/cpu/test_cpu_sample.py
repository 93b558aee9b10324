"""Native draws against the reference sampler: the same tokens, not merely the same distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cotrt.kernels.cpu.sample import sample
from cotrt.sampling.noise import row_keys
from cotrt.sampling.sampler import SampleOutput, SamplingBatch, sample_batch

F32 = np.float32


def draw(
    logits: torch.Tensor,
    *,
    rows: list[int] | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
) -> tuple[tuple[np.ndarray, ...], SampleOutput]:
    """What the native sampler and the reference draw."""
    index = np.array(range(len(logits)) if rows is None else rows, np.int32)
    count = len(index)
    seeds = np.arange(count, dtype=np.uint64) + np.uint64(seed)
    epochs, positions = np.zeros(count, np.uint32), np.arange(count, dtype=np.int64)
    values = (
        np.full(count, temperature, F32),
        np.full(count, top_k, np.int32),
        np.full(count, top_p, F32),
        np.full(count, min_p, F32),
    )
    batch = SamplingBatch(
        index, *values, seeds, epochs, positions, None, np.full(count, -1, np.int32)
    )
    low, high = row_keys(seeds, epochs, positions)
    return sample(logits, index, *values, low, high), sample_batch(logits, batch)


def same(found: tuple[np.ndarray, ...], expected: SampleOutput) -> None:
    ids, logprobs, bad = found
    assert ids.tolist() == expected.token_ids.tolist()
    assert bad.tolist() == expected.bad.tolist()
    assert np.allclose(logprobs, expected.logprobs, atol=1e-4, equal_nan=True)


@settings(max_examples=60, deadline=None)
@given(
    vocab=st.sampled_from([2, 63, 64, 65, 1000, 5000]),
    spread=st.sampled_from([0.1, 1.0, 4.0, 12.0]),
    temperature=st.sampled_from([0.0, 0.2, 0.7, 1.0, 2.0, 100.0]),
    top_k=st.sampled_from([0, 1, 2, 40, 4000]),
    top_p=st.sampled_from([1.0, 0.9, 0.31, 1e-6]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    seed=st.integers(0, 1000),
)
def test_any_parameters(
    vocab: int,
    spread: float,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
) -> None:
    logits = spread * torch.randn(4, vocab, generator=torch.Generator().manual_seed(seed))
    same(*draw(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed))


@pytest.mark.parametrize("vocab", [49_152, 151_936])
@pytest.mark.parametrize("top_p", [1.0, 0.95])
def test_large_vocabularies(vocab: int, top_p: float) -> None:
    logits = 2 * torch.randn(3, vocab, generator=torch.Generator().manual_seed(vocab))
    same(*draw(logits, temperature=0.8, top_p=top_p))


@pytest.mark.parametrize("top_p", [1e-6, 0.26])
def test_of_equal_tokens_the_lowest_are_kept(top_p: float) -> None:
    logits = torch.zeros(1, 100)
    drawn = {int(draw(logits, top_p=top_p, seed=seed)[0][0][0]) for seed in range(200)}
    assert max(drawn) == (0 if top_p < 0.01 else 25)


def test_greedy_takes_the_lowest_of_equal_tokens() -> None:
    logits = torch.zeros(2, 200)
    logits[:, [70, 150]] = 1
    same(*draw(logits, temperature=0))
    assert draw(logits, temperature=0)[0][0].tolist() == [70, 70]


def test_siblings_share_a_row_and_draw_apart() -> None:
    logits = torch.randn(2, 500, generator=torch.Generator().manual_seed(0))
    found, expected = draw(logits, rows=[1] * 8 + [0] * 8)
    same(found, expected)
    assert len(set(found[0].tolist())) > 8


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_k", [0, 3])
def test_bad_rows_are_told_apart(temperature: float, top_k: int) -> None:
    logits = torch.randn(5, 100, generator=torch.Generator().manual_seed(0))
    logits[0, 50] = torch.nan
    logits[1, 50] = torch.inf
    logits[2] = -torch.inf
    logits[3, :99] = -torch.inf
    found, expected = draw(logits, temperature=temperature, top_k=top_k)
    same(found, expected)
    assert found[2].tolist() == [True, True, True, False, False]
    assert found[0][3] == 99


def test_logprobs_are_of_the_raw_logits() -> None:
    raw = torch.randn(3, 300, generator=torch.Generator().manual_seed(0))
    masked = raw.clone()
    masked[:, 10:] = -torch.inf
    keys = np.arange(3, dtype=np.uint32)
    ones, zeros = np.ones(3, F32), np.zeros(3, np.int32)
    rows = np.array([2, 1, 0], np.int32)
    ids, logprobs, _ = sample(
        masked, rows, ones, zeros, ones, zeros.astype(F32), keys, keys, raw=raw, raw_rows=rows
    )
    assert (ids < 10).all()
    expected = raw.log_softmax(1)[torch.from_numpy(rows).long(), torch.from_numpy(ids).long()]
    assert np.allclose(logprobs, expected.numpy(), atol=1e-5)


def test_frequencies_are_those_of_the_softmax() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    found, _ = draw(logits, rows=[0] * 4000, seed=7)
    counts = np.bincount(found[0], minlength=4) / 4000
    assert np.abs(counts - logits.softmax(1)[0].numpy()).max() < 0.03
