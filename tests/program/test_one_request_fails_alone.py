"""A request's own error ends it and no other; what a score reuses is counted once."""

from __future__ import annotations

import pytest

from cotrt import LLM, InvalidRequestError, NumericsError, SamplingParams
from cotrt.testing import ScriptedModel


def scripted(next_probs, **options):
    model = ScriptedModel(next_probs, vocab_size=128, eos_token_id=0)
    return LLM(model, kv_cache_memory_bytes=1 << 16, **options)


def raises_after_z(ids):
    if ids[-1] == ord("z"):
        raise LookupError("nothing follows z")
    return {97: 1.0}


def test_a_model_that_raises_for_one_prompt_fails_that_prompt_alone():
    with scripted(raises_after_z) as llm:
        other = llm.branch("q").generate(max_tokens=200)
        with pytest.raises(LookupError, match="nothing follows z") as caught:
            llm.generate(["a", "z", "b"], SamplingParams(max_tokens=3))
        first, failed, last = caught.value.outputs
        assert failed is None
        assert first.outputs[0].text == last.outputs[0].text == "aaa"
        assert len(other.result().token_ids) == 200


def test_a_score_that_the_model_raises_in_leaves_the_branch_as_it_was():
    with scripted(raises_after_z) as llm, llm.branch("ab") as branch:
        with pytest.raises(LookupError):
            branch.score(["c", "zc"]).result()
        assert branch.generate(max_tokens=1).result().text == "a"


def test_tokens_outside_the_vocabulary_are_named():
    with scripted(lambda ids: {500: 1.0}) as llm, pytest.raises(ValueError, match="token 500"):
        llm.generate("a", SamplingParams(max_tokens=1))


def test_masks_that_leave_no_possible_token_are_named():
    params = SamplingParams(max_tokens=1, allowed_token_ids=[5])
    masked = pytest.raises(NumericsError, match="allowed_token_ids")
    with scripted(lambda ids: {97: 1.0}) as llm, masked:
        llm.generate("a", params)


def test_a_score_counts_what_it_reuses_once():
    with scripted(lambda ids: {97: 0.5, 98: 0.5}) as llm, llm.branch("x" * 30) as branch:
        branch.generate(max_tokens=1).result()
        branch.truncate(30)
        before = llm.metrics["prompt_tokens_reused"]
        branch.score(["a", "b", "ab", "ba"]).result()
        assert llm.metrics["prompt_tokens_reused"] - before == 30
        branch.choose(["a", "b"]).result()
        assert llm.metrics["prompt_tokens_reused"] - before == 60


def test_too_many_forks_are_refused():
    with scripted(lambda ids: {97: 1.0}) as llm:
        branch = llm.branch("a")
        with pytest.raises(InvalidRequestError, match="65536"):
            branch.fork(10**9)
