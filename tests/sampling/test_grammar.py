"""Structured outputs: every finished output follows its grammar; a cut one goes on where it was."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence

import pytest
from isolation import shared_fixture

import cotrt
from cotrt import LLM, SamplingParams, StructuredOutputs
from cotrt.testing import ScriptedModel

EOS = 0
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8, "pattern": "^[a-z]+$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def noise(ids: Sequence[int]) -> Mapping[int, float]:
    """Every printable character, by weights that depend on the path; spaces and lines seldom."""
    word = hash(tuple(ids)) & ((1 << 62) - 1)
    weights = {i: 1.0 + (word >> (i % 50) & 7) for i in range(33, 127)}
    return {**weights, 32: 0.01, 10: 0.01, EOS: 0.5}


@shared_fixture()
def llm() -> Iterator[LLM]:
    model = ScriptedModel(noise, vocab_size=130, eos_token_id=EOS)
    with LLM(model, kv_cache_memory_bytes=1 << 17) as made:
        yield made


def wanting(max_tokens: int | None = 200, **fields: object) -> SamplingParams:
    given = {k: fields.pop(k) for k in ("json", "regex", "choice", "grammar") if k in fields}
    return SamplingParams(
        structured_outputs=StructuredOutputs(**given), max_tokens=max_tokens, **fields
    )


def is_valid(text: str) -> bool:
    found = json.loads(text)
    return (
        set(found) == {"name", "age"}
        and re.fullmatch("[a-z]{1,8}", found["name"]) is not None
        and type(found["age"]) is int
        and 0 <= found["age"] <= 99
    )


def test_n_outputs_of_a_schema_all_parse_and_differ(llm: LLM) -> None:
    for _ in range(2):  # the second time from the compiled grammar
        outputs = llm.generate("x", wanting(json=SCHEMA, n=6))[0].outputs
        assert all(is_valid(output.text) for output in outputs)
        assert all(output.finish_reason == "stop" for output in outputs)
        assert len({output.text for output in outputs}) > 1


def test_prompts_of_one_batch_each_have_their_own_place(llm: LLM) -> None:
    params = [wanting(json=SCHEMA), wanting(regex="[0-9]{5}"), SamplingParams(max_tokens=9)]
    outputs = [r.outputs[0].text for r in llm.generate(["a", "b", "c"], params)]
    assert is_valid(outputs[0]) and re.fullmatch("[0-9]{5}", outputs[1]) and len(outputs[2]) == 9


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"regex": "(ab|cd){2}x?"}, "(ab|cd){2}x?"),
        ({"choice": ["yes", "no", 'qu"ote']}, 'yes|no|qu"ote'),
        ({"grammar": 'start: "a" | "b" start'}, "b*a"),
        ({"grammar": 'root ::= "x" root | "y"'}, "x*y"),
        ({"json": '{"enum": ["p", 3]}'}, '"p"|3'),
    ],
)
def test_each_kind_of_grammar_is_followed(
    llm: LLM, fields: dict[str, object], pattern: str
) -> None:
    for output in llm.generate("q", wanting(**fields, n=4))[0].outputs:
        assert output.finish_reason == "stop"
        assert re.fullmatch(pattern, output.text), output.text


def test_a_cut_output_says_length_and_goes_on_where_it_was(llm: LLM) -> None:
    branch = llm.branch("x")
    params = wanting(6, json=SCHEMA)
    first = branch.generate(params).result()
    assert first.finish_reason == "length" and len(first.token_ids) == 6
    texts = []
    with branch.fork(5) as forks:
        for output in forks.generate(wanting(json=SCHEMA)).result():
            assert output.finish_reason == "stop"
            texts.append(first.text + output.text)
    assert all(is_valid(text) for text in texts) and len(set(texts)) > 1
    branch.truncate(3)  # two tokens of the object are left
    rest = branch.generate(wanting(json=SCHEMA)).result()
    assert is_valid(branch.decode(1, 3) + rest.text)
    again = branch.generate(wanting(json=SCHEMA)).result()  # it was complete: a new object
    assert is_valid(again.text)


def test_forced_text_moves_the_grammar_on(llm: LLM) -> None:
    branch = llm.branch("x")
    branch.generate(wanting(1, regex="abc[0-9]+;")).result()
    branch.extend("bc77")
    output = branch.generate(wanting(regex="abc[0-9]+;")).result()
    assert re.fullmatch("x" + "abc77[0-9]*;", branch.text.rstrip("\0")), output
    branch.truncate(0).extend("y")
    assert re.fullmatch("abc[0-9]+;", branch.generate(wanting(regex="abc[0-9]+;")).result().text)


def test_preemption_keeps_each_place() -> None:
    model = ScriptedModel(noise, vocab_size=130, eos_token_id=EOS)
    wanted = wanting(120, regex="[a-f]{60};[0-9]{20}", seed=3)
    with LLM(model, kv_cache_memory_bytes=1 << 17) as llm:
        alone = [o.text for o in llm.generate("x", wanted.replace(n=4))[0].outputs]
    with LLM(model, kv_cache_memory_bytes=13 * 16 * 4) as llm:
        together = [o.text for o in llm.generate("x", wanted.replace(n=4))[0].outputs]
        assert llm.metrics["preemptions"] > 0
    assert alone == together
    assert all(re.fullmatch("[a-f]{60};[0-9]{20}", text) for text in alone)


def test_min_tokens_yields_to_a_complete_grammar(llm: LLM) -> None:
    output = llm.generate("x", wanting(choice=["yes", "no"], min_tokens=50))[0].outputs[0]
    assert output.text in ("yes", "no") and output.finish_reason == "stop"
    longer = llm.generate("x", wanting(regex="[a-z]+", min_tokens=20))[0].outputs[0]
    assert len(longer.token_ids) > 20


@pytest.mark.parametrize(
    "fields",
    [
        {"json": "{"},
        {"json": "[1]"},
        {"json": {"type": "no such type"}},
        {"regex": "("},
        {"grammar": "nonsense((("},
    ],
)
def test_a_grammar_that_is_none_is_refused_at_the_call(llm: LLM, fields: dict[str, object]) -> None:
    with pytest.raises(cotrt.InvalidRequestError, match="structured_outputs"):
        llm.generate("x", wanting(**fields))
    with pytest.raises(cotrt.InvalidRequestError, match="structured_outputs"):
        llm.branch("x").generate(wanting(**fields))


@pytest.mark.parametrize(
    "other",
    [{"ignore_eos": True}, {"allowed_token_ids": [65]}],
    ids=lambda other: next(iter(other)),
)
def test_what_contradicts_a_grammar_is_refused_beside_it(
    other: dict[str, object],
) -> None:
    with pytest.raises(ValueError, match=next(iter(other))):
        SamplingParams(structured_outputs=StructuredOutputs(regex="a"), **other)


@pytest.mark.slow
def test_the_starter_model_writes_json_by_its_own_tokens() -> None:
    with LLM("smollm2-135m") as llm:
        prompt = [{"role": "user", "content": "Invent a person."}]
        output = llm.chat(prompt, wanting(json=SCHEMA, seed=1), use_tqdm=False)[0].outputs[0]
    assert is_valid(output.text), output


def test_a_choice_of_thousands_is_one_of_them(llm: LLM) -> None:
    options = [f"{i} {'xyz'[i % 3]}" for i in range(5000)] + ["1 y and more", 'q"\\\n']
    for output in llm.generate("q", wanting(choice=options, n=8))[0].outputs:
        assert output.finish_reason == "stop" and output.text in options
    seven = {ord("7"): 1.0, EOS: 1e-9}
    model = ScriptedModel(lambda ids: seven, vocab_size=130, eos_token_id=EOS)
    with LLM(model, kv_cache_memory_bytes=1 << 17) as sure:
        output = sure.generate("q", wanting(choice=[str(i) for i in range(1000)]))[0].outputs[0]
        assert output.text == "777"  # the longer one, where a shorter could have ended


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"grammar": "start: " + " | ".join(f'"a" /{i}/' for i in range(2500))}, "max is 2000"),
        ({"json": {"$ref": "#"}}, "NoExtensionBias"),
        ({"json": '{"enum": ["\\ud800"]}'}, "not JSON serializable"),
        ({"json": {"enum": [object()]}}, "no JSON data"),
    ],
)
def test_what_the_library_cannot_hold_is_refused_in_its_words(
    llm: LLM, fields: dict[str, object], words: str
) -> None:
    with pytest.raises(cotrt.InvalidRequestError, match=f"structured_outputs.*{words}"):
        llm.generate("q", wanting(**fields))
    assert llm.generate("q", wanting(regex="ok"))[0].outputs[0].text == "ok"


def test_a_grammar_that_outgrows_the_library_ends_its_own_request_and_is_named(llm: LLM) -> None:
    wide = 'start: "begin" rest\nrest: ' + " | ".join(f'"a" /{i}/' for i in range(2500))
    with pytest.raises(cotrt.InvalidRequestError, match=r"the grammar grew.*max is 2000") as caught:
        llm.generate(["q", "r"], [wanting(grammar=wide), wanting(regex="ok")])
    assert "NaN" not in str(caught.value) and "<state>" not in str(caught.value)
    assert caught.value.outputs is not None
    assert caught.value.outputs[0] is None and caught.value.outputs[1].outputs[0].text == "ok"
