"""Draws against a plain sampler, their frequencies, edges of the filters, and logprobs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sampling_helpers import kept_by_filters, make_batch, plain_sample

from cotrt.kernels.reference import candidates, sample
from cotrt.sampling.sampler import sample_batch, token_logprobs

FIXED = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1]])) + 50


def random_logits(num_rows: int, vocab_size: int, spread: float, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * spread


def draw_many(logits: torch.Tensor, count: int, **fields: Any) -> np.ndarray:
    batch = make_batch(count, rows=[0] * count, positions=np.arange(count), **fields)
    return sample_batch(logits, batch).token_ids


class TestDefinition:
    """Every shortcut gives what the plain sampler gives."""

    @pytest.mark.parametrize("vocab_size", [1, 7, 64, 65, 1000, 5000])
    @pytest.mark.parametrize("spread", [0.01, 1.0, 6.0])
    def test_random_draws(self, vocab_size: int, spread: float) -> None:
        rng = np.random.default_rng(vocab_size)
        count = 120
        logits = random_logits(10, vocab_size, spread, seed=vocab_size)
        batch = make_batch(
            count,
            rows=rng.integers(0, 10, count),
            temperature=rng.choice([0.0, 0.3, 1.0, 1.0, 2.5, 100.0], count),
            top_k=rng.choice([0, 0, 1, 2, 50, 3000, 10**6], count),
            top_p=rng.choice([1.0, 1.0, 0.95, 0.5, 1e-6, 0.9999], count),
            min_p=rng.choice([0.0, 0.0, 0.05, 0.6, 1.0], count),
            seeds=rng.integers(0, 2**63, count),
            epochs=rng.integers(0, 5, count),
            positions=rng.integers(0, 10**6, count),
        )
        output = sample_batch(logits, batch)
        expected = [plain_sample(logits.numpy(), batch, draw) for draw in range(count)]
        assert output.token_ids.tolist() == expected
        assert not output.bad.any()

    def test_no_filter_over_a_wide_vocabulary(self) -> None:
        logits = random_logits(4, 40_000, 2.5, seed=0)
        logits[:, 17] += 12
        batch = make_batch(64, rows=np.arange(64) % 4, temperature=1.3, positions=np.arange(64))
        expected = [plain_sample(logits.numpy(), batch, draw) for draw in range(64)]
        assert sample_batch(logits, batch).token_ids.tolist() == expected

    def test_top_p_that_needs_nearly_all_of_a_flat_vocabulary(self) -> None:
        logits = random_logits(2, 20_000, 0.1, seed=0)
        batch = make_batch(8, rows=np.arange(8) % 2, top_p=0.999, positions=np.arange(8))
        expected = [plain_sample(logits.numpy(), batch, draw) for draw in range(8)]
        assert sample_batch(logits, batch).token_ids.tolist() == expected

    def test_chunks_change_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        logits = random_logits(6, 3000, 1.0, seed=1)
        fields: dict[str, Any] = {"top_p": [0.9, 1.0] * 3, "temperature": 0.7, "num_logprobs": 3}
        whole = sample_batch(logits, make_batch(6, **fields))
        monkeypatch.setattr(sample, "CHUNK", 3)
        monkeypatch.setattr(sample, "MAX_CANDIDATES", 1000)
        monkeypatch.setattr(candidates, "ELEMENTS_AT_ONCE", 1000)
        parts = sample_batch(logits, make_batch(6, **fields))
        assert whole.token_ids.tolist() == parts.token_ids.tolist()
        assert np.allclose(whole.logprobs, parts.logprobs, atol=1e-6)

    def test_offset_of_all_logits_changes_nothing(self) -> None:
        logits = (random_logits(3, 500, 3.0, seed=2) * 1024).round() / 1024
        batch = make_batch(3, temperature=0.8, top_p=[1, 0.9, 1])
        expected = sample_batch(logits, batch).token_ids
        assert (sample_batch(logits + 256, batch).token_ids == expected).all()

    def test_logits_are_not_changed(self) -> None:
        logits = random_logits(3, 130, 2.0, seed=3)
        before = logits.clone()
        sample_batch(logits, make_batch(3, top_p=0.8, top_k=5, num_logprobs=4))
        assert torch.equal(logits, before)


class TestKeys:
    def test_draw_is_the_same_alone_and_with_mates(self) -> None:
        logits = random_logits(7, 300, 1.0, seed=0)
        fields = {"seeds": np.arange(7), "positions": np.arange(7) * 3}
        for filters in ({}, {"top_p": 0.9}, {"top_k": 20}):
            together = sample_batch(logits, make_batch(7, **fields, **filters)).token_ids
            for row in range(7):
                batch = make_batch(1, seeds=row, positions=row * 3, **filters)
                assert sample_batch(logits[row : row + 1], batch).token_ids[0] == together[row]

    def test_siblings_share_a_logits_row_and_draw_apart(self) -> None:
        logits = random_logits(1, 1000, 0.5, seed=0)
        batch = make_batch(32, rows=[0] * 32, seeds=np.arange(32))
        assert len(set(sample_batch(logits, batch).token_ids.tolist())) > 28


class TestFrequencies:
    @pytest.mark.parametrize(
        ("fields", "support"),
        [
            ({"top_k": 2, "top_p": 0.5}, [0]),
            ({"top_k": 2, "top_p": 0.6}, [0, 1]),
            ({"top_p": 0.6}, [0, 1]),
            ({"top_p": 0.8}, [0, 1, 2]),
            ({"top_p": 1e-9}, [0]),
            ({"top_p": 1e-50}, [0]),  # 0 in float32
            ({"top_p": 1.0}, [0, 1, 2, 3]),
            ({"top_k": 0}, [0, 1, 2, 3]),
            ({"top_k": 10**6}, [0, 1, 2, 3]),
            ({"top_k": 3}, [0, 1, 2]),
            ({"min_p": 1.0}, [0]),
            ({"min_p": 0.0}, [0, 1, 2, 3]),
            ({"min_p": 0.6}, [0, 1]),
            # At temperature 2, probabilities are as the roots: .3 is .87 of the largest, .2 .71.
            ({"min_p": 0.6, "temperature": 2.0}, [0, 1, 2]),
            ({"min_p": 0.8, "temperature": 2.0}, [0, 1]),
            ({"temperature": 0.5, "top_p": 0.8}, [0, 1]),
        ],
        ids=str,
    )
    def test_support_is_exact_and_frequencies_are_renormalised(
        self, fields: dict[str, Any], support: list[int]
    ) -> None:
        count = 2000
        counts = np.bincount(draw_many(FIXED, count, **fields), minlength=4)
        assert counts.nonzero()[0].tolist() == support
        p = np.array([0.4, 0.3, 0.2, 0.1])[support] ** (1 / fields.get("temperature", 1.0))
        p /= p.sum()
        sigma = np.sqrt(count * p * (1 - p))
        assert (np.abs(counts[support] - count * p) <= 4 * sigma + 1e-9).all()

    def test_chi_square_over_many_tokens(self) -> None:
        logits = random_logits(1, 200, 1.0, seed=5)
        count = 20_000
        for fields in ({}, {"temperature": 0.7, "top_p": 0.9}):
            counts = np.bincount(draw_many(logits, count, **fields), minlength=200)
            ids, scaled = kept_by_filters(
                logits[0].numpy(), fields.get("temperature", 1), 0, fields.get("top_p", 1), 0
            )
            expected = np.exp(scaled) / np.exp(scaled).sum() * count
            assert counts.sum() == counts[ids].sum()
            chi_square = ((counts[ids] - expected) ** 2 / expected).sum()
            degrees = len(ids) - 1
            assert abs(chi_square - degrees) < 4 * np.sqrt(2 * degrees)

    def test_impossible_tokens_never_come(self) -> None:
        logits = torch.full((1, 300), -torch.inf)
        logits[0, [3, 290]] = torch.tensor([0.0, 0.0])
        for fields in ({}, {"top_p": 0.99}, {"top_k": 10}, {"min_p": 0.1}):
            assert set(draw_many(logits, 200, **fields).tolist()) == {3, 290}


class TestTies:
    def test_greedy_takes_the_lowest_id(self) -> None:
        logits = torch.zeros(2, 5000)
        logits[0, [4999, 70, 64]] = 2.0
        assert sample_batch(logits, make_batch(2, temperature=0)).token_ids.tolist() == [64, 0]

    def test_top_k_keeps_exactly_k_by_lowest_id(self) -> None:
        logits = torch.zeros(1, 300)
        logits[0, 200] = 1.0
        assert set(draw_many(logits, 500, top_k=3).tolist()) == {200, 0, 1}
        assert set(draw_many(torch.zeros(1, 300), 50, top_k=1).tolist()) == {0}

    def test_min_p_of_one_keeps_all_of_the_likeliest(self) -> None:
        logits = torch.tensor([[1.0, 3.0, 3.0, 2.0]])
        assert set(draw_many(logits, 200, min_p=1.0).tolist()) == {1, 2}


class TestTemperature:
    @pytest.mark.parametrize("temperature", [1e-45, 1e-7, 1e-3])
    def test_tiny_ones_are_greedy(self, temperature: float) -> None:
        logits = random_logits(1, 500, 3.0, seed=0)
        for fields in ({}, {"top_p": 0.9}):
            ids = draw_many(logits, 20, temperature=temperature, **fields)
            assert set(ids.tolist()) == {int(logits.argmax())}

    def test_huge_one_is_nearly_even(self) -> None:
        counts = np.bincount(draw_many(FIXED, 4000, temperature=100.0), minlength=4)
        assert (np.abs(counts - 1000) < 4 * np.sqrt(4000 * 0.25 * 0.75)).all()


class TestBadRows:
    @pytest.mark.parametrize("value", [torch.nan, torch.inf])
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_a_bad_row_fails_alone(self, value: float, temperature: float) -> None:
        logits = random_logits(3, 200, 1.0, seed=0)
        expected = sample_batch(logits, make_batch(3, temperature=temperature))
        logits[1, 150] = value
        output = sample_batch(logits, make_batch(3, temperature=temperature, num_logprobs=2))
        assert output.bad.tolist() == [False, True, False]
        assert output.token_ids.tolist() == [expected.token_ids[0], -1, expected.token_ids[2]]
        assert np.isnan(output.logprobs[1]) and sorted(output.top) == [0, 2]

    def test_a_row_without_a_possible_token_is_bad(self) -> None:
        output = sample_batch(torch.full((1, 10), -torch.inf), make_batch(1))
        assert output.bad.tolist() == [True]

    def test_no_draws(self) -> None:
        output = sample_batch(torch.zeros(0, 10), make_batch(0))
        assert len(output.token_ids) == 0 and output.top == {}


class TestLogprobs:
    def test_raw_ones_are_log_softmax_of_the_raw_logits(self) -> None:
        logits = random_logits(5, 777, 3.0, seed=0)
        batch = make_batch(5, temperature=[0, 0.5, 1, 2, 1], top_k=[0, 0, 4, 0, 0],
                           num_logprobs=[5, 0, -1, 20, 3])  # fmt: skip
        output = sample_batch(logits, batch)
        expected = torch.log_softmax(logits.double(), -1).numpy()
        rows = np.arange(5)
        assert np.allclose(output.logprobs, expected[rows, output.token_ids], atol=1e-5)
        assert sorted(output.top) == [0, 1, 3, 4]
        for row, n in ((0, 5), (1, 0), (3, 20), (4, 3)):
            top = output.top[row]
            order = np.argsort(-expected[row], kind="stable")[:n]
            assert top.ids.tolist() == order.tolist()
            assert np.allclose(top.logprobs, expected[row, order], atol=1e-5)
            sampled = expected[row, output.token_ids[row]]
            assert top.rank == 1 + (expected[row] > sampled).sum()

    def test_more_asked_than_there_are(self) -> None:
        output = sample_batch(FIXED, make_batch(1, temperature=0, num_logprobs=20))
        assert output.top[0].ids.tolist() == [0, 1, 2, 3]
        assert np.allclose(np.exp(output.top[0].logprobs), [0.4, 0.3, 0.2, 0.1], atol=1e-5)

    def test_processed_ones_are_of_the_distribution_drawn_from(self) -> None:
        logits = random_logits(4, 200, 2.0, seed=1)
        batch = make_batch(4, temperature=[0, 0.5, 1, 2], top_k=[0, 0, 4, 0], top_p=[1, 1, 1, 0.7],
                           num_logprobs=20, processed_logprobs=True)  # fmt: skip
        output = sample_batch(logits, batch)
        for row in range(4):
            ids, scaled = kept_by_filters(
                logits[row].numpy(), float(batch.temperature[row]) or 1.0,
                int(batch.top_k[row]), float(batch.top_p[row]), 0,
            )  # fmt: skip
            expected = scaled - np.log(np.exp(scaled).sum())
            top = output.top[row]
            assert top.ids.tolist() == ids[:20].tolist()
            assert np.allclose(top.logprobs, expected[:20], atol=1e-5)
            place = ids.tolist().index(output.token_ids[row])
            assert np.isclose(output.logprobs[row], expected[place], atol=1e-5)

    def test_given_tokens(self) -> None:
        logits = random_logits(3, 90, 2.0, seed=2)
        rows, ids = torch.tensor([0, 0, 2]), torch.tensor([5, 89, 7])
        logprobs, top = token_logprobs(logits, rows, ids, np.array([-1, 0, 2], np.int32))
        expected = torch.log_softmax(logits.double(), -1)
        assert np.allclose(logprobs, expected[rows, ids], atol=1e-5)
        assert sorted(top) == [1, 2] and len(top[1].ids) == 0 and len(top[2].ids) == 2
        none, _ = token_logprobs(logits, rows[:0], ids[:0], np.empty(0, np.int32))
        assert len(none) == 0
