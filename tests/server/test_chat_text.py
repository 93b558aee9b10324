"""Reasoning, content and tool calls: the same whole as in pieces of any size, and odd texts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotrt.server.call_scanner import CallScanner
from cotrt.server.chat_text import ChatText, message_of

PARTS = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>", "\n", " ", "text"),
    *('{"name": "f", "arguments": {"a": [1, {"b": "}\\""}]}}', '{"name": "f", "parameters": {}}'),
    *('{"arguments": {"x": 1}, "name": "g"}', '{"name": "f"}', '{"name": 3}', '{"a": 1}', "{", "<"),
    *('{"name": "f", "arguments": "{\\"q\\": 1}"}', ";", "<tool", '"', "}", "é🦊", "<thi"),
]


def read(text: str, cuts: list[int], **options: Any) -> dict[str, Any]:
    reader = ChatText(**options)
    deltas, last = [], 0
    for cut in [*sorted(cuts), len(text)]:
        deltas += reader.append(text[last:cut])
        last = max(last, cut)
    message = message_of(deltas + reader.finish())
    for call in message.get("tool_calls", ()):
        assert call.pop("id").startswith("call_")
    return message


@settings(max_examples=400, deadline=None)
@given(
    parts=st.lists(st.sampled_from(PARTS), max_size=8),
    style=st.sampled_from([None, "hermes", "llama3_json"]),
    inside=st.booleans(),
    data=st.data(),
)
def test_pieces_of_any_size_make_the_same_message(
    parts: list[str], style: str | None, inside: bool, data: st.DataObject
) -> None:
    text = "".join(parts)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=12))
    options = {"reasoning": True, "thinks_at_once": inside, "tool_style": style}
    options["tool_names"] = {"f", "g"}
    whole = read(text, [], **options)
    assert read(text, cuts, **options) == whole
    assert read(text, list(range(len(text))), **options) == whole


def calls(text: str, style: str = "hermes") -> Any:
    found = read(text, [], reasoning=False, tool_style=style, tool_names={"f", "g"})
    made = found.get("tool_calls", [])
    return found["content"], [(c["function"]["name"], c["function"]["arguments"]) for c in made]


def test_arguments_come_as_the_model_wrote_them() -> None:
    given = '{"a": "\\n}", "b": [ {}, "]" ]}'
    text = f'<tool_call>{{"name": "f", "arguments": {given}}}</tool_call>'
    assert calls(text) == (None, [("f", given)])
    assert calls('<tool_call>{"arguments": {"x": 1}, "name": "g"}</tool_call>')[1] == [
        ("g", '{"x": 1}')
    ]
    text = '<tool_call>{"name": "f", "arguments": "{\\"q\\": 1}"}</tool_call>'
    assert calls(text)[1] == [("f", '{"q": 1}')]
    assert calls('<tool_call>{"name": "f"}</tool_call>')[1] == [("f", "{}")]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call>nothing</tool_call>",
        '<tool_call>{"name": 3}</tool_call>',
        '<tool_call>{"name": "f", ',
        "a < b and <tool",
        '{"name": "f", "arguments": {}}',
    ],
)
def test_what_is_no_call_stays_text_whole(text: str) -> None:
    content, made = calls(text)
    assert made == [] and content == text


def test_text_around_calls_is_kept_and_white_space_is_not() -> None:
    one = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    assert calls(f"First.\n\n{one}\n{one}\n") == ("First.", [("f", "{}")] * 2)
    assert calls(f"{one} and then")[0] == " and then"


def test_llama_calls_are_the_whole_text_or_none() -> None:
    one = '{"name": "f", "parameters": {"a": 1}}'
    assert calls(one, "llama3_json") == (None, [("f", '{"a": 1}')])
    assert calls(f"<|python_tag|>{one}; {one}", "llama3_json")[1] == [("f", '{"a": 1}')] * 2
    assert calls(f"I say {one}", "llama3_json") == (f"I say {one}", [])
    other = '{"name": "unknown", "parameters": {}}'
    assert calls(other, "llama3_json") == (other, [])


@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=10,
    ),
    st.sampled_from([None, 2]),
)
def test_the_scanner_reads_any_arguments(value: Any, indent: int | None) -> None:
    arguments = {"value": value}
    text = json.dumps({"x": [1], "name": "n", "arguments": arguments, "y": None}, indent=indent)
    scanner = CallScanner()
    assert sum(scanner.feed(character) for character in text + "rest") == len(text)
    assert scanner.is_done and scanner.name == "n"
    assert json.loads(scanner.arguments) == arguments
