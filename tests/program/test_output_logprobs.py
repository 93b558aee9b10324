"""Log-probabilities: raw or processed, of prompts that are cached, and of branches."""

from __future__ import annotations

import math

import pytest
from api_helpers import letters, scripted

from cotrt import Logprob, SamplingParams


def expected(ids, token, probs=letters, temperature=1.0):
    weights = {i: w ** (1 / temperature) for i, w in probs(ids).items()}
    return math.log(weights[token] / sum(weights.values())) if token in weights else -math.inf


def test_raw_logprobs_are_those_of_the_model_whatever_was_drawn_from():
    with scripted() as llm:
        branch = llm.branch("abc")
        params = {"temperature": 0.5, "top_k": 3, "logit_bias": {97: 5.0}, "logprobs": 2}
        output = branch.generate(max_tokens=10, **params).result()
        ids = branch.token_ids
        for i, (token, entry) in enumerate(zip(output.token_ids, output.logprobs)):
            wanted = expected(ids[: 3 + i], token)
            assert entry[token].logprob == pytest.approx(wanted, abs=1e-5)
            assert entry[token].decoded_token == chr(token)
            assert 2 <= len(entry) <= 3 and all(isinstance(e, Logprob) for e in entry.values())
            assert branch.logprobs[3 + i] == pytest.approx(wanted, abs=1e-5)
            ranks = [e.rank for e in entry.values()]
            assert set(ranks) >= {1, 2} or len(set(letters(ids[: 3 + i]).values())) < 26
        assert output.cumulative_logprob == pytest.approx(sum(branch.logprobs[3:]))
        assert branch.logprobs[:3] == [None] * 3
        assert branch.sampled == [False] * 3 + [True] * 10


def test_processed_logprobs_are_those_of_the_distribution_drawn_from():
    with scripted(logprobs_mode="processed") as llm:
        branch = llm.branch("abc")
        output = branch.generate(max_tokens=10, temperature=0.5, logprobs=1).result()
        ids = branch.token_ids
        for i, (token, entry) in enumerate(zip(output.token_ids, output.logprobs)):
            wanted = expected(ids[: 3 + i], token, temperature=0.5)
            assert entry[token].logprob == pytest.approx(wanted, abs=1e-5)
        kept = branch.generate(max_tokens=5, top_k=1, logprobs=0).result()
        assert [e[t].logprob for e, t in zip(kept.logprobs, kept.token_ids)] == [0.0] * 5


def test_logprobs_0_is_the_sampled_token_alone_and_none_is_none():
    with scripted() as llm:
        params = [SamplingParams(max_tokens=4, logprobs=n) for n in (None, 0, 20)]
        none, zero, many = [r.outputs[0] for r in llm.generate(["abc"] * 3, params)]
        assert none.logprobs is None
        assert [list(entry) for entry in zero.logprobs] == [[t] for t in zero.token_ids]
        assert all(len(entry) in (20, 21) for entry in many.logprobs)
        assert none.cumulative_logprob < 0


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 48, 50])
def test_prompt_logprobs_on_cached_prefixes_equal_the_first_ones(length):
    with scripted() as llm:
        prompt = [97 + i % 7 for i in range(length)]
        params = SamplingParams(max_tokens=2, prompt_logprobs=1, temperature=0)
        first = llm.generate(prompt, params)[0]
        plain = llm.generate(prompt, SamplingParams(max_tokens=2, temperature=0))[0]
        again, mate = llm.generate([prompt, prompt], params)
        for result in (first, again, mate):
            entries = result.prompt_logprobs
            assert len(entries) == length and entries[0] is None
            for i in range(1, length):
                wanted = expected(prompt[:i], prompt[i])
                assert entries[i][prompt[i]].logprob == pytest.approx(wanted, abs=1e-5)
                assert entries[i][prompt[i]].rank >= 1
            assert result.outputs[0].token_ids == plain.outputs[0].token_ids
        assert plain.prompt_logprobs is None


def test_prompt_logprobs_without_sampling_and_with_n():
    with scripted() as llm:
        only = llm.generate("abcd", SamplingParams(max_tokens=0, prompt_logprobs=0))[0]
        assert [len(entry) for entry in only.prompt_logprobs[1:]] == [1, 1, 1]
        assert only.outputs[0].token_ids == []
        many = llm.generate("abcd", SamplingParams(n=3, max_tokens=2, prompt_logprobs=0))[0]
        assert [e[t].logprob for e, t in zip(many.prompt_logprobs[1:], [98, 99, 100])] == [
            pytest.approx(expected([97, 98, 99][:i], [98, 99, 100][i - 1])) for i in (1, 2, 3)
        ]
        assert len(many.outputs) == 3


def test_impossible_tokens_score_minus_infinity():
    with scripted() as llm:
        score = llm.branch("abc").score("A").result()
        assert score.total == score.mean == -math.inf


def test_scores_and_choices_are_the_models_and_leave_the_branch():
    with scripted() as llm:
        branch = llm.branch("abc")
        many = branch.score(["de", "x"], given="zz").result()
        base = [*b"abczz"]
        assert many[0].logprobs == pytest.approx(
            [expected(base, 100), expected([*base, 100], 101)], abs=1e-5
        )
        assert many[0].mean == pytest.approx(many[0].total / 2)
        assert many[1].token_ids == [120] and branch.text == "abc"
        choice = branch.choose(["de", "x"], given="zz", normalize="sum").result()
        best = 0 if many[0].total >= many[1].total else 1
        assert choice.index == best and choice.option == ["de", "x"][best]
        assert branch.text == "abczz" + choice.option
        assert not any(branch.sampled) and branch.logprobs == [None] * len(branch)
