"""Grammars beside stops and bad words, dead ends, digits, white space, thoughts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from isolation import shared_fixture

import cotrt
from cotrt import LLM, SamplingParams, StructuredOutputs
from cotrt.sampling.grammar import ascii_digits
from cotrt.testing import ScriptedModel

EOS = 0
OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}


def noise(ids: Sequence[int]) -> Mapping[int, float]:
    word = hash(tuple(ids)) & ((1 << 62) - 1)
    weights = {i: 1.0 + (word >> (i % 50) & 7) for i in range(33, 127)}
    return {**weights, 32: 9.0, 10: 9.0, 0x0663: 9.0, EOS: 3.0}


def made(next_probs: Any = noise) -> LLM:
    model = ScriptedModel(next_probs, vocab_size=0x700, eos_token_id=EOS)
    return LLM(model, kv_cache_memory_bytes=1 << 19)


@shared_fixture()
def llm() -> Iterator[LLM]:
    with made() as llm:
        yield llm


def texts(llm: LLM, n: int = 6, **fields: Any) -> list[str]:
    given = {
        k: fields.pop(k) for k in ("json", "regex", "choice", "grammar", "thought") if k in fields
    }
    fields = {"max_tokens": 300, "seed": 2, **fields}
    params = SamplingParams(n=n, structured_outputs=StructuredOutputs(**given), **fields)
    outputs = llm.generate("x", params, use_tqdm=False)[0].outputs
    return [output.text for output in outputs if output.finish_reason == "stop"]


@pytest.mark.parametrize(
    "stops",
    [{"stop": ["b", "7"]}, {"stop_token_ids": [ord("b"), ord("-")]}, {"stop": "ab-"}],
    ids=lambda stops: next(iter(stops)),
)
def test_stops_do_not_cut_inside_a_grammar(llm: LLM, stops: dict[str, Any]) -> None:
    for text in (found := texts(llm, regex="ab-[0-9]{4}7b", **stops)):
        assert re.fullmatch("ab-[0-9]{4}7b", text)
    assert len(found) == 6
    with llm.branch("x") as branch:
        wanted = StructuredOutputs(regex="ab-[0-9]{4}7b")
        pieces = branch.generate(structured_outputs=wanted, seed=1, **stops)
        assert re.fullmatch("ab-[0-9]{4}7b", "".join(chunk.text for chunk in pieces))


def test_bad_words_are_banned_where_the_grammar_leaves_another_token(llm: LLM) -> None:
    assert set(texts(llm, 16, choice=["red", "blue", "grey"], bad_words=["r", "g"])) == {"blue"}
    # Of `red` alone nothing else can begin it: the grammar goes first.
    assert set(texts(llm, choice=["red"], bad_words=["r"])) == {"red"}
    assert all("5" not in text for text in texts(llm, regex="[0-9]{20}", bad_words=["5"]))


@pytest.mark.parametrize(
    ("pattern", "python"),
    [
        (r"\d{3}-\d{4}", r"[0-9]{3}-[0-9]{4}"),
        (r"[\dx]{9}", r"[0-9x]{9}"),
        (r"[^\D]{9}", r"[0-9]{9}"),
        (r"\\d\d", r"\\d[0-9]"),
        (r"[]\d]{9}", r"[]0-9]{9}"),
    ],
)
def test_digits_of_a_regex_are_those_of_ascii(llm: LLM, pattern: str, python: str) -> None:
    found = texts(llm, 20, regex=pattern)
    assert len(found) == 20 and all(re.fullmatch(python, text, re.ASCII) for text in found)


def test_only_digit_classes_of_a_pattern_change() -> None:
    for pattern in (r"\w+\s*", r"[a-z\]]", r"\\\\d", "(a|b)[^]x]"):
        assert ascii_digits(pattern) == pattern


@pytest.mark.parametrize("schema", [OBJECT, {"type": "array", "items": OBJECT, "maxItems": 3}])
def test_white_space_in_json_is_compact(llm: LLM, schema: dict[str, Any]) -> None:
    for text in texts(llm, 12, json=schema):
        bare = re.sub(r'"(\\.|[^"\\])*"', '""', text)
        assert re.fullmatch(r"(?:[^ \n\t\r]|(?<=[,:]) )*", bare), text
    for text in ('{"a": 1, "b": ""}', '{"a":1,"b":""}'):
        ids = [*map(ord, text), EOS]
        with made(lambda path, ids=ids: {ids[min(len(path) - 1, len(ids) - 1)]: 1.0}) as sure:
            assert texts(sure, 1, json=OBJECT) == [text]


@pytest.mark.parametrize(
    "more", [{"uniqueItems": True}, {"contains": {"const": 1}}, {"unevaluatedItems": False}]
)
def test_keywords_that_cannot_be_held_to_are_let_pass(llm: LLM, more: dict[str, Any]) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3, **more}
    assert all(isinstance(json.loads(text), list) for text in texts(llm, json=schema))


@pytest.mark.parametrize(
    ("fields", "next_id"),
    [
        ({"regex": "[0-9]{3}!"}, "7"),
        ({"choice": ["7!", "8!"]}, "7"),
        ({"json": {"enum": ["a"]}}, '"'),
        ({"grammar": 'start: "7" "8"'}, "7"),
    ],
)
def test_a_dead_end_is_the_requests_fault(fields: dict[str, Any], next_id: str) -> None:
    with made(lambda path: {ord(next_id): 1.0}) as llm:
        with pytest.raises(cotrt.InvalidRequestError, match="dead end") as caught:
            texts(llm, 1, **fields)
        assert caught.value.field == "structured_outputs" and "NaN" not in str(caught.value)
        with llm.branch("x") as branch:  # one such request ends no other
            assert branch.generate(max_tokens=3).result().text == next_id * 3


def test_a_models_nan_is_not_blamed_on_the_grammar() -> None:
    with (
        made(lambda path: {ord("7"): float("inf")}) as llm,
        pytest.raises(cotrt.NumericsError, match="NaN"),
    ):
        texts(llm, 1, regex="[0-9]+")


@pytest.mark.parametrize("regex", ["(a{1000}){1000}", "((b{99}){99}){99}"])
def test_a_grammar_without_a_first_token_is_refused_at_the_call(llm: LLM, regex: str) -> None:
    with pytest.raises(cotrt.InvalidRequestError) as caught:
        texts(llm, 1, regex=regex)
    assert caught.value.field == "structured_outputs"


def test_a_thought_that_was_cut_anywhere_goes_on() -> None:
    said = 'Well, {"a"} </thi </think>\n\n{"a": 1}'
    ids = [*map(ord, said), EOS]
    wanted = StructuredOutputs(json=OBJECT, thought="open")
    with made(lambda path: {ids[min(len(path) - 1, len(ids) - 1)]: 1.0}) as llm:
        branch = llm.branch("x")
        assert branch.generate(structured_outputs=wanted).result().text == said
        for length in range(len(said), 1, -1):
            branch.truncate(length)
            output = branch.generate(structured_outputs=wanted).result()
            assert output.text == said[length - 1 :] and output.finish_reason == "stop"


@pytest.mark.parametrize("said", ["Thinking", "Thinking </thin"])
def test_a_thought_is_closed_where_the_output_would_end(said: str) -> None:
    ids = [*map(ord, said), EOS]

    def next_probs(path: list[int]) -> Mapping[int, float]:
        if len(path) - 1 < len(ids):
            return {ids[len(path) - 1]: 1.0}
        return noise(path)

    with made(next_probs) as llm:
        (text,) = texts(llm, 1, json={"enum": [{"a": 1}]}, thought="open")
    thought, _, answer = text.partition("</think>")
    assert thought == said and isinstance(json.loads(answer), dict)


def test_a_thought_is_optional_where_it_may_come() -> None:
    for said in ('{"a": 1}', '<think>\nA {\n</think>\n{"a":1}', '<think></think>{"a": 1}'):
        ids = [*map(ord, said), EOS]
        with made(lambda path, ids=ids: {ids[min(len(path) - 1, len(ids) - 1)]: 1.0}) as llm:
            assert texts(llm, 1, json=OBJECT, thought="optional") == [said]


def test_without_a_thought_an_optional_one_adds_nothing(llm: LLM) -> None:
    for text in texts(llm, 20, regex="[0-9]{4}", thought="optional"):
        assert re.fullmatch("[0-9]{4}", text) or text.lstrip().startswith("<think>")
