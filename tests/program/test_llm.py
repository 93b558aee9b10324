"""The LLM itself: its options, models without a tokenizer, submissions refused half-way."""

from __future__ import annotations

import pytest

from cotrt import LLM, SamplingParams
from cotrt.testing import ScriptedModel


@pytest.fixture
def llm():
    model = ScriptedModel(lambda ids: {97: 1.0}, vocab_size=128, eos_token_id=0)
    with LLM(model, kv_cache_memory_bytes=1 << 16) as llm:
        yield llm


@pytest.mark.parametrize("n", [1, 3])
def test_sequences_made_before_the_refusal_are_dropped(llm, n):
    good = SamplingParams(max_tokens=2)
    bad = SamplingParams(n=n, max_tokens=2, bad_words=["€"])
    with pytest.raises(ValueError, match="characters"):
        llm.generate(["abc", "abd"], [good, bad])
    assert not llm._runtime.engine.scheduler.sequences
    assert llm.generate("abc", good)[0].outputs[0].text == "aa"


def test_a_model_without_a_tokenizer_takes_ids():
    model = ScriptedModel(lambda ids: {5: 1.0}, vocab_size=16, eos_token_id=0)
    model.tokenizer = None
    with LLM(model, kv_cache_memory_bytes=1 << 16) as llm:
        output = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))[0].outputs[0]
        assert output.token_ids == [5, 5] and output.text == ""
        assert llm.tokenizer is None


def test_llm_names_every_option_of_the_engine_with_its_default():
    import dataclasses
    import inspect

    from cotrt.options.engine import EngineConfig

    named = {
        name: parameter.default
        for name, parameter in inspect.signature(LLM).parameters.items()
        if name != "model"
    }
    fields = {f.name: f.default for f in dataclasses.fields(EngineConfig) if f.name != "model"}
    assert named == fields
