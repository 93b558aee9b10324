"""Beam search: right by brute force and by transformers, and no token computed twice."""

from __future__ import annotations

import itertools
import math

import pytest
from api_helpers import EOS, counting, is_idle, letters, scripted

from cotrt import (
    BeamSearchParams,
    InvalidRequestError,
    NumericsError,
    PromptTooLongError,
)


def three(ids):
    """Weights of a, b and the end that depend on every token before."""
    weights = list(letters(ids).values())
    return {97: weights[0] + weights[1], 98: weights[2] + weights[3], EOS: weights[4] / 2}


def every_sequence(prompt, length):
    """All sequences of at most `length` tokens and their log-probabilities, by brute force."""
    found = {}
    for path in itertools.product([97, 98, EOS], repeat=length):
        total, tokens = 0.0, []
        for token in path:
            weights = three([*prompt, *tokens])
            total += math.log(weights[token] / sum(weights.values()))
            tokens.append(token)
            if token == EOS:
                break
        found[tuple(tokens)] = total
    return found


def test_a_beam_as_wide_as_the_tree_finds_the_best_of_all_sequences():
    with scripted(three) as llm:
        params = BeamSearchParams(beam_width=100, max_tokens=4, length_penalty=0.0)
        [output] = llm.beam_search("xyz", params)
        ranked = sorted(every_sequence([120, 121, 122], 4).items(), key=lambda item: -item[1])
        assert [tuple(s.tokens) for s in output.sequences[:5]] == [t for t, _ in ranked[:5]]
        for sequence in output.sequences:
            wanted = every_sequence([120, 121, 122], 4)[tuple(sequence.tokens)]
            assert sequence.cum_logprob == sequence.score == pytest.approx(wanted, abs=1e-5)
            assert sequence.finish_reason == ("stop" if sequence.tokens[-1] == EOS else "length")
        assert len(output.sequences) == len(every_sequence([120, 121, 122], 4))
        assert is_idle(llm)


def test_width_sequences_best_first_with_text_of_generated_tokens_alone():
    with scripted(three) as llm:
        one, two = llm.beam_search(
            ["xyz", [120]], BeamSearchParams(beam_width=3, max_tokens=6, length_penalty=0.7)
        )
        for output in (one, two):
            scores = [s.score for s in output.sequences]
            assert len(scores) == 3 and scores == sorted(scores, reverse=True)
            for s in output.sequences:
                assert s.score == pytest.approx(s.cum_logprob / len(s.tokens) ** 0.7)
                assert s.text == "".join(map(chr, s.tokens))


def test_prompt_tokens_are_computed_once_and_beams_count_as_sampled():
    with scripted(letters) as llm:
        llm.beam_search("hello there, world", BeamSearchParams(beam_width=8, max_tokens=20))
        metrics = llm.metrics
        assert metrics["prompt_tokens_computed"] == 18 and metrics["recomputed_tokens"] == 0
        assert metrics["generated_tokens_computed"] <= 8 * 19
        assert is_idle(llm)
        llm.beam_search("hello there, world", BeamSearchParams(beam_width=2, max_tokens=3))
        assert llm.metrics["prompt_tokens_computed"] == 18


def test_ignore_eos_and_the_context_s_end():
    with scripted(three, max_model_len=10) as llm:
        params = BeamSearchParams(beam_width=2, max_tokens=50, ignore_eos=True)
        [output] = llm.beam_search("xyz", params)
        assert [len(s.tokens) for s in output.sequences] == [7, 7]
        assert {s.finish_reason for s in output.sequences} == {"length"}


def test_temperature_divides_the_logits():
    with scripted(three) as llm:
        greedy = BeamSearchParams(beam_width=1, max_tokens=1, ignore_eos=True)
        [hot] = llm.beam_search("xyz", greedy.replace(temperature=2.0))
        [cold] = llm.beam_search("xyz", greedy)
        weights = three([120, 121, 122])
        best = max(weights.values())
        for output, power in ((hot, 0.5), (cold, 1.0)):
            wanted = math.log(best**power / sum(w**power for w in weights.values()))
            assert output.sequences[0].score == pytest.approx(wanted, abs=1e-5)


def test_fewer_possible_sequences_than_beams_come_back_alone():
    with scripted(counting) as llm:
        [output] = llm.beam_search("a", BeamSearchParams(beam_width=4, max_tokens=3))
        assert [s.text for s in output.sequences] == ["bcd"]


def test_bad_prompts_are_named_and_errors_leave_nothing_behind():
    from api_helpers import Nan

    def probs(ids):
        return {98: Nan()} if ids[0] == ord("!") and len(ids) > 3 else letters(ids)

    params = BeamSearchParams(beam_width=2, max_tokens=5)
    with scripted(probs, max_model_len=30) as llm:
        with pytest.raises(PromptTooLongError, match="prompt 1"):
            llm.beam_search(["a", "b" * 40], params)
        with pytest.raises(InvalidRequestError, match="token_ids"):
            llm.beam_search(llm.branch("a"), params)
        with pytest.raises(InvalidRequestError, match="BeamSearchParams"):
            llm.beam_search("a", None)
        with pytest.raises(NumericsError, match="prompt 1"):
            llm.beam_search(["a", "!"], params)
        assert is_idle(llm)
        llm._runtime.engine.check_invariants()


def test_in_a_pool_that_is_too_small_for_all_beams_the_result_is_the_same():
    params = BeamSearchParams(beam_width=6, max_tokens=40)
    with scripted(letters) as large, scripted(letters, kv_cache_memory_bytes=16 * 4 * 9) as small:
        prompt = "a prompt of some tokens"
        [wanted], [found] = (llm.beam_search(prompt, params) for llm in (large, small))
        assert [s.tokens for s in found.sequences] == [s.tokens for s in wanted.sequences]
        assert is_idle(small)


@pytest.mark.parametrize(
    ("prompt", "width", "length", "penalty"),
    [
        ("The three primary colors are", 4, 10, 1.0),
        ("<|im_start|>user\nSay hi<|im_end|>\n<|im_start|>assistant\n", 3, 20, 0.0),
    ],
)
def test_equal_in_score_to_transformers_on_the_starter_model(smol, prompt, width, length, penalty):
    import torch
    from transformers import AutoModelForCausalLM

    from cotrt.models import starter

    ids = smol.tokenizer.encode(prompt)
    params = BeamSearchParams(beam_width=width, max_tokens=length, length_penalty=penalty)
    [output] = smol.beam_search([ids], params)
    model = AutoModelForCausalLM.from_pretrained(starter.ensure(), dtype=torch.float32).eval()
    with torch.no_grad():
        found = model.generate(
            torch.tensor([ids]),
            num_beams=width,
            num_return_sequences=width,
            early_stopping=False,
            max_new_tokens=length,
            length_penalty=penalty,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
            pad_token_id=2,
        )
    for ours, theirs, score in zip(output.sequences, found.sequences, found.sequences_scores):
        assert ours.score == pytest.approx(float(score), abs=1e-3)
        assert ours.tokens == theirs[len(ids) : len(ids) + len(ours.tokens)].tolist()
