"""The Triton sampler against the sampler of the reference, token for token."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cotrt.kernels.reference.candidates import BlockedLogits
from cotrt.kernels.reference.sample import Draws, sample_filtered, sample_plain
from cotrt.kernels.triton import sample as module
from cotrt.kernels.triton.penalties import apply_penalties
from cotrt.kernels.triton.sample import sample
from cotrt.options.sampling import SamplingParams
from cotrt.sampling.noise import row_keys
from cotrt.sampling.processors import LogitsProcessor, apply_processors


def keys(num_draws: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    seeds = np.arange(seed, seed + num_draws).astype(np.uint64)
    return row_keys(seeds, np.zeros(num_draws, np.uint32), np.arange(num_draws, dtype=np.int64))


def make_logits(num_rows: int, vocab_size: int, device, *, spread: float = 3.0, ties=False):
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * spread
    if ties:
        logits = (logits * 2).round() / 2
    return logits.to(device)


def draw(logits, rows, temperature, top_k, top_p, min_p, seed=0):
    """The kernel's draws, and the reference's of the same keys."""
    count = len(rows)
    low, high = keys(count, seed)

    def array(value, dtype):
        return np.broadcast_to(np.asarray(value, dtype), (count,)).copy()

    temperature, top_p, min_p = (array(v, np.float32) for v in (temperature, top_p, min_p))
    top_k = array(top_k, np.int32)
    rows = np.asarray(rows, np.int32)
    ids, _, bad = sample(logits, rows, temperature, top_k, top_p, min_p, low, high)
    assert ids.device == logits.device and not bad.any()
    draws = Draws(
        torch.from_numpy(rows.astype(np.int64)),
        torch.from_numpy(temperature.astype(np.float64)),
        torch.from_numpy(top_k.astype(np.int64)),
        torch.from_numpy(top_p.astype(np.float64)),
        torch.from_numpy(min_p.astype(np.float64)),
        torch.from_numpy(low.view(np.int32)),
        torch.from_numpy(high.view(np.int32)),
    )
    blocked = BlockedLogits(logits.cpu())
    if (top_k == 0).all() and (top_p == 1).all() and (min_p == 0).all():
        expected = sample_plain(blocked, draws)
    else:
        expected, _ = sample_filtered(blocked, draws)
    return ids.cpu().tolist(), expected.tolist()


@pytest.mark.parametrize("vocab_size", [7, 1024, 2500])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 7.0])
def test_unfiltered_draws_are_the_references(vocab_size, temperature, device):
    logits = make_logits(3, vocab_size, device)
    found, expected = draw(logits, [0, 1, 2, 1, 1, 0, 2, 2], temperature, 0, 1.0, 0.0)
    assert found == expected


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (1, 1.0, 0.0),
        (40, 1.0, 0.0),
        (0, 0.9, 0.0),
        (0, 1e-9, 0.0),
        (0, 1.0, 0.05),
        (50, 0.7, 0.01),
        (0, 0.95, 0.2),
        (1500, 0.99, 0.0),
        (5000, 0.5, 0.0),
    ],
)
def test_filtered_draws_are_the_references(top_k, top_p, min_p, device):
    logits = make_logits(2, 1700, device)
    found, expected = draw(logits, [0, 1, 1], 0.9, top_k, top_p, min_p, seed=9)
    assert found == expected


def test_filters_differ_by_draw(device):
    logits = make_logits(1, 1500, device)
    found, expected = draw(
        logits, [0] * 6, [0.5, 1, 1, 2, 1, 1], [0, 3, 0, 9, 0, 2], [1, 1, 0.3, 0.8, 1, 1],
        [0, 0, 0, 0, 0.3, 0.5],
    )  # fmt: skip
    assert found == expected


def test_ties_at_the_threshold_keep_the_lowest_ids(device):
    logits = make_logits(1, 600, device, ties=True, spread=1.0)
    found, expected = draw(
        logits, [0] * 12, 3.0, [25] * 4 + [0] * 4 + [400] * 4, [1] * 4 + [0.3] * 4 + [0.35] * 4, 0.0
    )
    assert found == expected
    flat = torch.zeros(1, 600, device=device)
    found, expected = draw(flat, [0] * 8, 1.0, 5, 1.0, 0.0)
    assert found == expected and max(found) < 5


def test_more_candidates_than_scratch_holds(device, monkeypatch):
    monkeypatch.setattr(module, "CANDIDATES", 16)
    logits = make_logits(1, 1200, device)
    for top_k, top_p, min_p in ((60, 1.0, 0.0), (0, 0.95, 0.0), (0, 1.0, 0.001)):
        found, expected = draw(logits, [0] * 2, 1.2, top_k, top_p, min_p)
        assert found == expected


def test_greedy_takes_the_lowest_id_of_equal_ones(device):
    logits = torch.zeros(2, 2100, device=device)
    logits[0, [1500, 700, 2000]] = 5.0
    low, high = keys(2)
    zeros, ones = np.zeros(2, np.float32), np.ones(2, np.float32)
    ids, logprobs, bad = sample(
        logits, np.array([0, 1]), zeros, np.zeros(2, np.int32), ones, zeros, low, high
    )
    assert ids.tolist() == [700, 0] and not bad.any()
    expected = torch.log_softmax(logits, 1)[[0, 1], [700, 0]]
    torch.testing.assert_close(logprobs.cpu(), expected.cpu(), rtol=0, atol=1e-5)


def test_bad_rows_are_marked_and_masked_ones_are_not(device):
    logits = make_logits(5, 1100, device)
    logits[0, 1050] = torch.nan
    logits[1, 3] = torch.inf
    logits[2] = -torch.inf
    logits[3] = -torch.inf
    logits[3, 1099] = -2.0
    low, high = keys(5)
    ones, zeros = np.ones(5, np.float32), np.zeros(5, np.float32)
    ids, logprobs, bad = sample(
        logits, np.arange(5), ones, np.zeros(5, np.int32), ones, zeros, low, high
    )
    assert bad.tolist() == [True, True, True, False, False]
    assert ids[:4].tolist() == [-1, -1, -1, 1099]
    assert torch.isnan(logprobs[:3]).all() and logprobs[3] == 0.0


def test_logprobs_are_of_the_raw_logits(device):
    raw = make_logits(2, 1300, device)
    masked = raw.clone()
    masked[:, 100:] = -torch.inf
    low, high = keys(3)
    ones, zeros = np.ones(3, np.float32), np.zeros(3, np.float32)
    ids, logprobs, _ = sample(
        masked, np.array([0, 1, 1]), ones, np.zeros(3, np.int32), ones, zeros, low, high,
        raw=raw, raw_rows=np.array([0, 1, 1]),
    )  # fmt: skip
    assert (ids < 100).all()
    expected = torch.log_softmax(raw, 1)[[0, 1, 1], ids.long()]
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=2e-5)


def test_penalties_are_the_processors(device):
    prompt, generated = [3, 5, 900], [[5, 5, 7], [], [1, 2, 3, 3]]
    rules = [
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
        {"repetition_penalty": 0.7, "logit_bias": {4: 2.5}},
        {"frequency_penalty": -0.4, "logit_bias": {3: -1.0, 8: 1.0}},
    ]
    logits = make_logits(3, 1000, device)
    processors, offsets = [], [0]
    ids: list[int] = []
    counts: list[int] = []
    seen: list[int] = []
    biases: list[float] = []
    for rule, made in zip(rules, generated, strict=True):
        params = SamplingParams(**rule)
        built = LogitsProcessor.build(params, vocab_size=1000, eos_token_ids=(), tokenizer=None)
        assert built is not None
        processors.append(built.bind(prompt, made))
        bias = rule.get("logit_bias", {})
        for token in sorted({*prompt, *made, *bias}):
            ids.append(token)
            counts.append(made.count(token))
            seen.append(int(token in prompt or token in made))
            biases.append(bias.get(token, 0.0))
        offsets.append(len(ids))
    expected = logits.cpu().clone()
    apply_processors(expected, processors)

    def ints(values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    def floats(values):
        return torch.tensor(values, dtype=torch.float32, device=device)

    apply_penalties(
        logits, ints(offsets), ints(ids), ints(counts), ints(seen), floats(biases),
        floats([r.get("repetition_penalty", 1.0) for r in rules]),
        floats([r.get("presence_penalty", 0.0) for r in rules]),
        floats([r.get("frequency_penalty", 0.0) for r in rules]),
    )  # fmt: skip
    torch.testing.assert_close(logits.cpu(), expected, rtol=0, atol=1e-5)


def bound(rule: dict, prompt: list[int], generated: list[int], vocab_size: int) -> LogitsProcessor:
    params = SamplingParams(**rule)
    built = LogitsProcessor.build(params, vocab_size=vocab_size, eos_token_ids=(), tokenizer=None)
    assert built is not None
    return built.bind(prompt, generated)


def test_penalties_count_on_the_device_what_is_drawn(device, monkeypatch):
    """Draw after draw, the host told of nothing, as the processors that see every token."""
    import cotrt.kernels.triton.penalties as penalties_module

    monkeypatch.setattr(penalties_module, "_ROOM", 2)  # so that the table grows on the way
    rules = [
        {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.3},
        None,
        {"frequency_penalty": 1.5, "logit_bias": {4: 3.0, 9: -2.0}},
    ]
    prompt, vocab_size = [3, 5, 3, 17], 20
    generated: list[list[int]] = [[5, 7], [], [4]]
    edits = [
        None if rule is None else bound(rule, prompt, list(made), vocab_size)
        for rule, made in zip(rules, generated, strict=True)
    ]
    assert all(each is None or each.only_edits for each in edits)
    logits = make_logits(2, vocab_size, device, spread=1.0)
    rows = np.array([1, 0, 1], np.int32)
    values = np.ones(3, np.float32), np.zeros(3, np.int32), np.ones(3, np.float32)
    min_p = np.zeros(3, np.float32)
    sampler = module.Sampler(logits.device)
    copies = []
    for position in range(7):
        low, high = row_keys(
            np.arange(3).astype(np.uint64), np.zeros(3, np.uint32), np.full(3, position)
        )
        ids, logprobs, bad = sampler(logits, rows, *values, min_p, low, high, edits=edits)
        copies.append(sampler.num_copies)
        changed = logits.cpu()[torch.from_numpy(rows.astype(np.int64))].clone()
        for row, rule in enumerate(rules):
            if rule is not None:
                apply_processors(
                    changed[row : row + 1],
                    [bound(rule, prompt, list(generated[row]), vocab_size)],
                )
        draws = Draws(
            torch.arange(3), torch.ones(3, dtype=torch.float64), torch.zeros(3, dtype=torch.int64),
            torch.ones(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64),
            torch.from_numpy(low.view(np.int32)), torch.from_numpy(high.view(np.int32)),
        )  # fmt: skip
        expected = sample_plain(BlockedLogits(changed), draws).tolist()
        assert ids.tolist() == expected and not bad.any()
        at = torch.from_numpy(rows.astype(np.int64))
        raw = torch.log_softmax(logits.cpu(), 1)[at, torch.tensor(expected)]
        torch.testing.assert_close(logprobs.cpu(), raw, rtol=0, atol=2e-5)
        for made, token in zip(generated, expected, strict=True):
            made.append(token)
    assert set(np.diff(copies)) == {1}, "a step copies the keys of its draws and nothing else"


def test_a_processor_that_bans_is_no_matter_of_edits():
    for rule in ({"allowed_token_ids": [1, 2]}, {"min_tokens": 2, "stop_token_ids": [3]}):
        assert not bound(rule, [], [], 10).only_edits
    assert bound({"logit_bias": {1: 1.0}}, [], [], 10).only_edits
