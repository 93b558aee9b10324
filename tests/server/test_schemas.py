"""Objects of tools and strict formats are closed, unless the schema says that they are open."""

from __future__ import annotations

import json
from typing import Any

import pytest
from server_rig import EOS, running, scripted

from cotrt.server.schemas import arguments_schema, closed

ASK = [{"role": "user", "content": "Hi"}]
POINT = {"type": "object", "properties": {"x": {"type": "integer"}}}


def test_objects_with_named_properties_are_closed_at_every_depth() -> None:
    schema = {
        "type": "object",
        "properties": {"p": POINT, "list": {"type": "array", "items": POINT}, "any": {}},
        "$defs": {"q": POINT},
    }
    found = closed(schema)
    shut = {**POINT, "additionalProperties": False}
    assert found["additionalProperties"] is False
    assert found["properties"] == {"p": shut, "list": {"type": "array", "items": shut}, "any": {}}
    assert found["$defs"] == {"q": shut} and schema["$defs"] == {"q": POINT}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {**POINT, "additionalProperties": True},
        {**POINT, "additionalProperties": {"type": "string"}},
        {**POINT, "patternProperties": {"^a": {}}},
        {**POINT, "allOf": [POINT]},
        {**POINT, "anyOf": [POINT, {"required": ["x"]}]},
        {"enum": [{"properties": 1}]},
    ],
)
def test_what_says_itself_that_it_is_open_is_left_as_it_is(schema: dict[str, Any]) -> None:
    assert closed(schema) == schema


@pytest.mark.parametrize(
    "given", [None, {}, {"type": "object"}, {"type": "object", "properties": {}}]
)
def test_no_parameters_are_the_empty_object(given: dict[str, Any] | None) -> None:
    found = arguments_schema(given)
    assert found["type"] == "object" and found["additionalProperties"] is False


def noise(path: Any) -> dict[int, float]:
    word = hash(tuple(path)) & ((1 << 62) - 1)
    return {**{i: 1.0 + (word >> (i % 50) & 7) for i in range(32, 127)}, 10: 3.0, EOS: 5.0}


@pytest.mark.parametrize(
    ("parameters", "keys"),
    [
        (None, set()),
        ({"type": "object", "properties": {}}, set()),
        (POINT, {"x"}),
        ({**POINT, "properties": {"p": {"$ref": "#/$defs/q"}}, "$defs": {"q": POINT}}, {"p"}),
    ],
)
def test_forced_calls_have_no_keys_of_their_own(
    parameters: dict[str, Any] | None, keys: set[str]
) -> None:
    function = {"name": "f", "strict": True, "parameters": parameters}
    tools = [{"type": "function", "function": function}]
    with running(scripted(noise, vocab_size=130)) as rig:
        body = {"messages": ASK, "tools": tools, "tool_choice": "required", "n": 8, "seed": 1}
        reply = rig.post("/v1/chat/completions", body)
    for choice in reply["choices"]:
        (call,) = choice["message"]["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        assert set(arguments) <= keys and set(arguments.get("p", ())) <= {"x"}


def test_strict_formats_are_closed_and_others_are_not() -> None:
    with running(scripted(noise, vocab_size=130)) as rig:
        for strict in (True, False, None):
            form = {"name": "p", "schema": {**POINT, "required": ["x"]}, "strict": strict}
            form["schema"] = {**form["schema"], "properties": {"x": {"type": "boolean"}}}
            body = {
                "messages": ASK,
                "response_format": {"type": "json_schema", "json_schema": form},
                "max_tokens": 200,
                "n": 12,
                "seed": 1,
            }
            choices = rig.post("/v1/chat/completions", body)["choices"]
            texts = [c["message"]["content"] for c in choices]
            is_closed = all(
                text in ('{"x": true}', '{"x":true}', '{"x": false}', '{"x":false}')
                for text in texts
            )
            assert is_closed == bool(strict)
