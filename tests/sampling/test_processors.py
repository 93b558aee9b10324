"""Penalties, biases and bans, against a model of ten lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from sampling_helpers import WordTokenizer, make_batch

from cotrt.errors import InvalidRequestError
from cotrt.options.sampling import SamplingParams
from cotrt.sampling.processors import LogitsProcessor, apply_processors
from cotrt.sampling.sampler import sample_batch

VOCAB = 40


def build(
    tokenizer: WordTokenizer | None = None, eos: Sequence[int] = (2,), **fields: Any
) -> LogitsProcessor:
    processor = LogitsProcessor.build(
        SamplingParams(**fields), vocab_size=VOCAB, eos_token_ids=eos, tokenizer=tokenizer
    )
    assert processor is not None
    return processor


def penalised(
    logits: np.ndarray, prompt: list[int], generated: list[int], params: SamplingParams
) -> np.ndarray:
    """The definition: repetition over prompt and output, the others over the output alone."""
    logits = logits.astype(np.float64)
    for token in set(prompt + generated):
        factor = params.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token in set(generated):
        logits[token] -= params.presence_penalty
        logits[token] -= params.frequency_penalty * generated.count(token)
    return logits


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": 2.0},
        {"presence_penalty": -2.0},
        {"frequency_penalty": 2.0},
        {"repetition_penalty": 1.8},
        {"repetition_penalty": 0.5, "presence_penalty": 0.3, "frequency_penalty": -0.7},
    ],
    ids=str,
)
def test_greedy_with_penalties_follows_the_model_step_by_step(fields: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    prompt = [7, 3, 7, 9, 7, 1, 4, 4, 30, 31, 7, 8]
    params = SamplingParams(**fields)
    generated: list[int] = []
    processor = build(**fields).bind(prompt, generated)
    mate = build(logit_bias={5: 1.0}).bind([], [])
    for _ in range(12):
        logits = rng.normal(size=(3, VOCAB)).astype(np.float32)
        logits[1, 7] += 3  # the token of the prompt is the likely one
        batch = make_batch(3, temperature=[1, 0, 0], processors=[mate, processor, None])
        found = sample_batch(torch.from_numpy(logits), batch).token_ids
        assert found[1] == penalised(logits[1], prompt, generated, params).argmax()
        assert found[2] == logits[2].argmax()
        generated.append(int(found[1]))


def test_every_logit_is_as_the_model_says() -> None:
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(4, VOCAB)).astype(np.float32)
    params = [
        SamplingParams(repetition_penalty=1.3, frequency_penalty=0.5),
        SamplingParams(presence_penalty=1.5),
        SamplingParams(repetition_penalty=2.0),
        SamplingParams(frequency_penalty=-1.0, presence_penalty=1.0),
    ]
    prompts = [rng.integers(0, VOCAB, 30).tolist() for _ in params]
    outputs = [rng.integers(0, VOCAB, n).tolist() for n in (0, 5, 60, 25)]
    bound = []
    for p, prompt, output in zip(params, prompts, outputs, strict=True):
        processor = LogitsProcessor.build(p, vocab_size=VOCAB, eos_token_ids=[], tokenizer=None)
        assert processor is not None
        bound.append(processor.bind(prompt, output))
    changed = torch.from_numpy(logits.copy())
    apply_processors(changed, bound)
    for row in range(4):
        expected = penalised(logits[row], prompts[row], outputs[row], params[row])
        assert np.allclose(changed[row], expected, atol=1e-6)


def test_one_request_bound_to_two_forks_keeps_their_histories_apart() -> None:
    shared = build(presence_penalty=2.0)
    one, two = shared.bind([1], [5]), shared.bind([1], [6])
    logits = torch.zeros(2, VOCAB)
    apply_processors(logits, [one, two])
    assert logits[0].nonzero().tolist() == [[5]] and logits[1].nonzero().tolist() == [[6]]


def test_params_that_change_no_logits_need_no_processor() -> None:
    params = SamplingParams(temperature=0.3, top_p=0.5, stop="x", ignore_eos=True, min_tokens=4)
    built = LogitsProcessor.build(params, vocab_size=9, eos_token_ids=[2], tokenizer=None)
    assert built is None


def test_logit_bias_and_allowed_tokens() -> None:
    processor = build(logit_bias={3: -100, 4: 2.5}, allowed_token_ids=[9, 4, 3]).bind([], [])
    logits = torch.full((1, VOCAB), 0.5)
    apply_processors(logits, [processor])
    expected = torch.full((VOCAB,), -torch.inf)
    expected[[3, 4, 9]] = torch.tensor([-99.5, 3.0, 0.5])
    assert torch.equal(logits[0], expected)


def test_min_tokens_bans_what_ends_until_then() -> None:
    generated: list[int] = []
    processor = build(min_tokens=2, stop_token_ids=[8]).bind([], generated)
    assert sorted(processor.banned()) == [2, 8]
    generated.append(5)
    assert sorted(processor.banned()) == [2, 8]
    generated.append(5)
    assert processor.banned() == []
    inherited = build(min_tokens=1).bind([], [5, 5, 5])
    assert inherited.banned() == [2]
    ignoring = build(min_tokens=2, stop_token_ids=[8], ignore_eos=True).bind([], [])
    assert ignoring.banned() == [8]


def test_bad_words_of_several_tokens_with_and_without_a_space() -> None:
    tokenizer = WordTokenizer(["a", " ", " b", "b", "c", " a", "d"])
    generated: list[int] = []
    processor = build(tokenizer, bad_words=["bc", "d"]).bind([], generated)
    assert processor.banned() == [6]  # "d" alone; " d" is two tokens
    for token, banned in ((3, [4, 6]), (2, [4, 6]), (4, [6]), (1, [6])):
        generated.append(token)
        assert sorted(set(processor.banned())) == banned


def test_bad_words_look_at_generated_tokens_only() -> None:
    tokenizer = WordTokenizer(["a", "b", " "])
    processor = build(tokenizer, bad_words=["ab"]).bind([0], [])
    assert processor.banned() == []


def test_bans_that_would_leave_nothing_are_lifted_for_that_draw() -> None:
    tokenizer = WordTokenizer(["a", " ", "b"])
    generated: list[int] = []
    processor = build(tokenizer, allowed_token_ids=[0], bad_words=["aa"]).bind([], generated)
    for _ in range(3):
        batch = make_batch(1, processors=[processor])
        output = sample_batch(torch.zeros(1, VOCAB), batch)
        assert output.token_ids.tolist() == [0] and not output.bad.any()
        generated.append(0)


def test_requests_that_can_never_work_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="logit_bias names token id 40"):
        build(logit_bias={40: 1.0})
    with pytest.raises(InvalidRequestError, match="allowed_token_ids names token id 99"):
        build(allowed_token_ids=[1, 99])
    with pytest.raises(InvalidRequestError, match="needs a tokenizer"):
        build(bad_words=["x"])
    with pytest.raises(InvalidRequestError, match="only tokens that"):
        build(allowed_token_ids=[2], min_tokens=1)


def test_raw_logprobs_do_not_see_processors_and_processed_ones_do() -> None:
    logits = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1]]))
    params = SamplingParams(allowed_token_ids=[1, 2])
    built = LogitsProcessor.build(params, vocab_size=4, eos_token_ids=[], tokenizer=None)
    assert built is not None
    fields: dict[str, Any] = {"temperature": 0, "num_logprobs": 4, "processors": [built]}
    raw = sample_batch(logits, make_batch(1, **fields))
    assert raw.token_ids[0] == 1 and np.isclose(np.exp(raw.logprobs[0]), 0.3)
    assert raw.top[0].ids.tolist() == [0, 1, 2, 3] and raw.top[0].rank == 2
    processed = sample_batch(logits, make_batch(1, processed_logprobs=True, **fields))
    assert np.isclose(np.exp(processed.logprobs[0]), 0.6)
    assert processed.top[0].ids.tolist() == [1, 2] and processed.top[0].rank == 1
