"""Replies read: the same whole as cut anywhere, what is no call is content, odd calls, states."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reply_texts import NUM_TEXTS, STYLES, joined, random_reply, read

from cotrt.program.call_scanner import CallScanner
from cotrt.program.reply_parser import ReplyParser, new_call_id
from cotrt.program.tool_calls import ToolCall, parse_tool_calls, read_reply

NAMES = frozenset("fg")


@pytest.mark.parametrize("style", STYLES)
def test_a_reply_cut_at_every_place_is_read_as_the_whole(style: str | None) -> None:
    rng = random.Random(f"cuts {style}")
    for _ in range(NUM_TEXTS // len(STYLES)):
        text = random_reply(rng)
        options: dict[str, Any] = {
            "thoughts": rng.random() < 0.8,
            "opened": rng.random() < 0.3,
            "style": style,
            "names": rng.choice([None, NAMES]),
            "forced": rng.random() < 0.1,
            "hidden": rng.choice([(), ("<think>", "</think>", "<tool_call>", "</tool_call>")]),
        }
        whole = read(text, **options)
        for cut in range(1, len(text)):
            assert read(text, [cut], **options) == whole, (text, cut, options)
        assert read(text, list(range(len(text))), **options) == whole, (text, options)


def test_without_calls_the_content_is_the_text_to_the_last_character() -> None:
    rng = random.Random(3)
    seen = 0
    for _ in range(NUM_TEXTS):
        text = random_reply(rng)
        for style in STYLES:
            _, content, calls = read(text, thoughts=False, style=style, names=NAMES)
            if not calls:
                assert content == text
                seen += 1
    assert seen > NUM_TEXTS


def test_a_reply_that_goes_on_shows_what_is_new_and_only_that() -> None:
    rng = random.Random(4)
    for _ in range(NUM_TEXTS):
        text = random_reply(rng)
        whole = read(text, style="any")
        if whole[2]:
            continue
        cut = rng.randrange(len(text) + 1)
        parser = ReplyParser(style="any")
        parser.prime(text[:cut])
        events = parser.append(text[cut:]) + parser.finish()
        shown = "".join(event.text for event in events)  # type: ignore[union-attr]
        # White space around a thought's tags belongs to neither.
        new, all_of_it = _dense(shown), _dense("".join(whole[:2]))
        assert all_of_it.endswith(new), (text, cut)
        assert len(all_of_it) - len(new) <= len(_dense(text[:cut])), (text, cut)


def _dense(text: str) -> str:
    return "".join(text.split())


@pytest.mark.parametrize("written", ['""', "null", '" "', '"null"', '"{}"', "{}"])
@pytest.mark.parametrize("style", ["hermes", "llama3_json"])
def test_no_arguments_are_the_empty_object(style: str, written: str) -> None:
    text = f'{{"name": "f", "parameters": {written}}}'
    if style == "hermes":
        text = f"<tool_call>{text}</tool_call>"
    assert read(text, style=style, names=NAMES)[2] == [("f", "{}")]
    assert parse_tool_calls(text) == [ToolCall("f", {})]


@pytest.mark.parametrize("written", ["3", "[1]", '"no object"', "true", '"[1]"'])
def test_arguments_that_are_no_object_make_no_call(written: str) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>'
    assert read(text, style="hermes") == ("", text, [])
    assert parse_tool_calls(text)[0].error


@pytest.mark.parametrize(
    "text",
    [
        "Hi \n<tool_call>{}</tool_call> tail",
        "<tool_call>",
        "<tool_call></tool_call>",
        '<tool_call>{"name": "f", ',
        '<tool_call>{"nome": "f", "arguments": {}}</tool_call>',
        "<tool_call>f()</tool_call>\n\n",
        " \n a < b and <tool",
    ],
)
def test_what_is_no_call_stays_text_whole(text: str) -> None:
    assert read(text, style="hermes") == ("", text, [])


def test_text_in_a_calls_tag_is_content_and_further_objects_are_calls() -> None:
    one = '{"name": "f", "arguments": {}}'
    found = read(f"<tool_call>{one}\n{one.replace('f', 'g')}</tool_call>", style="hermes")
    assert found == ("", "", [("f", "{}"), ("g", "{}")])
    assert read(f"<tool_call>{one} but</tool_call> so", style="hermes")[1] == " but so"
    assert read(f"{one}; {{}} x", style="llama3_json", names=NAMES)[1] == "; {} x"


def test_arguments_come_as_the_model_wrote_them() -> None:
    written = '{"a": "\\n}", "b": [ {}, "]" ]}'
    text = f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>'
    assert read(text, style="hermes")[2] == [("f", written)]
    text = '<tool_call>{"arguments": {"x": 1}, "name": "g"}</tool_call>'
    assert read(text, style="hermes")[2] == [("g", '{"x": 1}')]


def test_text_around_calls_is_kept_and_white_space_is_not() -> None:
    one = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    calls = [("f", "{}")]
    assert read(f"First.\n\n{one}\n{one}\n", style="hermes") == ("", "First.", calls * 2)
    assert read(f"{one} and then", style="hermes") == ("", " and then", calls)


def test_unmarked_calls_begin_the_text_and_name_a_tool() -> None:
    one = '{"name": "f", "parameters": {"a": 1}}'
    found = [("f", '{"a": 1}')]
    assert read(one, style="llama3_json", names=NAMES) == ("", "", found)
    assert read(f"<|python_tag|>{one}; {one}", style="llama3_json", names=NAMES)[2] == found * 2
    for text in (f"I say {one}", one.replace('"f"', '"h"'), '{"name": "f", "age": 3}'):
        assert read(text, style="llama3_json", names=NAMES) == ("", text, [])


def test_calls_count_after_the_thought_only() -> None:
    draft = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    for text, opened in ((f"<think>{draft}</think>\nNo.", False), (f"{draft}</think>No.", True)):
        reply = read_reply(text, opened=opened)
        assert reply.calls == [] and reply.content == "No." and reply.thought == draft
    assert len(read_reply(f"<think>{draft}</think>{draft}").calls) == 1


def test_of_a_forced_call_that_is_cut_nothing_is_content() -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    for cut in range(len(text) + 1):
        thought, content, calls = read(text[:cut], style="hermes", forced=True)
        assert thought == content == "" and len(calls) <= 1


def test_hidden_tags_are_read_and_not_shown() -> None:
    tags = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    text = '<think>a <tool_call>b</think>c</tool_call> <tool_call>{"city": 1}</tool_call> d'
    assert read(text, style="hermes", hidden=tags) == ("a b", 'c {"city": 1} d', [])


@pytest.mark.parametrize(
    ("said", "new", "found"),
    [
        ("<think>abc", " d</think>e", (" d", "e", [])),
        ("<think>abc</think>", "e", ("", "e", [])),
        ("<thi", "nk>x</think>y", ("x", "y", [])),
        ("Hello ", "world", ("", "world", [])),
        ("Hi <tool", "box", ("", "box", [])),
        ('<tool_call>{"name": "f", "arg', 'uments": {}}</tool_call>', ("", "", [("f", "{}")])),
        ('<tool_call>{"name": "f", "arguments": {"a"', ": 1}}", ("", "", [("f", '{"a": 1}')])),
        ('<tool_call>{"name": "f"', " no", ("", " no", [])),
    ],
)
def test_a_continued_text_leaves_the_parser_where_it_ends(said: str, new: str, found: Any) -> None:
    for pieces in ([new], list(new)):
        parser = ReplyParser(style="hermes")
        parser.prime(said)
        events = [event for piece in pieces for event in parser.append(piece)]
        assert joined(events + parser.finish()) == found


def test_call_ids_are_nine_letters_and_digits() -> None:
    ids = {new_call_id() for _ in range(100)}
    assert len(ids) == 100 and all(len(i) == 9 and i.isalnum() and i.isascii() for i in ids)


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
