"""Thoughts, grammars and calls together, on each kind of tokenizer, whole and streamed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from server_rig import EOS, Rig, running, scripted
from tokenized import KINDS, saying, tokenizer_folder

TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}|{% endfor %}{{ tools or '' }}"
ASKS = "{% if add_generation_prompt %}<assistant>{% endif %}"
PLAIN = TURNS + ASKS
OPENED = (
    TURNS + "{% if add_generation_prompt %}<assistant>"
    "{% if enable_thinking is not defined or enable_thinking %}\n<think>\n{% endif %}{% endif %}"
)
HYBRID = PLAIN + "{# <think> </think> #}"
ASK = [{"role": "user", "content": "Two and two?"}]
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"n": 4}}\n</tool_call>'
GRAMMARS: dict[str, tuple[dict[str, Any], str]] = {
    "json_schema": ({"response_format": FORMAT}, '{"n": 4}'),
    "json_object": ({"response_format": {"type": "json_object"}}, '{"n":4}'),
    "guided_regex": ({"guided_regex": r"\d+ apples"}, "4 apples"),
    "guided_choice": ({"guided_choice": ["three", "four"]}, "four"),
    "guided_grammar": ({"guided_grammar": 'start: "4" ("0")*'}, "400"),
    "required": ({"tools": TOOLS, "tool_choice": "required"}, CALL),
    "named": (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "add"}}},
        CALL,
    ),
}


def both(rig: Rig, **body: Any) -> dict[str, Any]:
    """A reply: content, reasoning_content, calls, finish_reason; the same streamed."""
    body = {"messages": ASK, "max_tokens": 300, **body}
    choice = rig.post("/v1/chat/completions", body)["choices"][0]
    message = choice["message"]
    whole = {
        "content": message["content"] or "",
        "thought": message.get("reasoning_content", ""),
        "calls": [
            (c["function"]["name"], c["function"]["arguments"])
            for c in message.get("tool_calls", ())
        ],
        "end": choice["finish_reason"],
    }
    streamed: dict[str, Any] = {"content": "", "thought": "", "calls": [], "end": None}
    calls: list[list[str]] = []
    for event in rig.events("/v1/chat/completions", {**body, "stream": True}):
        delta = event["choices"][0]["delta"]
        streamed["content"] += delta.get("content") or ""
        streamed["thought"] += delta.get("reasoning_content") or ""
        for part in delta.get("tool_calls", ()):
            if "id" in part:
                calls.append([part["function"]["name"], ""])
            calls[part["index"]][1] += part["function"]["arguments"]
        streamed["end"] = event["choices"][0]["finish_reason"]
    streamed["calls"] = [(name, arguments) for name, arguments in calls]
    assert streamed == whole
    return whole


def some_of(kind: str) -> dict[str, tuple[dict[str, Any], str]]:
    """All grammars on one tokenizer, two of them on each."""
    kept = GRAMMARS if kind == "special" else ("json_schema", "required")
    return {name: GRAMMARS[name] for name in kept}


@pytest.mark.parametrize("template", [OPENED, HYBRID], ids=["opened", "hybrid"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_grammar_begins_after_the_thought(tmp_path: Path, kind: str, template: str) -> None:
    folder = tokenizer_folder(tmp_path, kind)
    opening = "" if template == OPENED else "<think>\n"
    for name, (fields, answer) in some_of(kind).items():
        said = f"{opening}Two and two, {{4}} <tool_call>?\n</think>\n\n{answer}"
        with running(saying(folder, said, template)) as rig:
            found = both(rig, **fields)
        assert found["thought"].startswith("Two and two, {4}"), (name, found)
        if name in ("required", "named"):
            assert found["calls"] == [("add", '{"n": 4}')] and found["end"] == "tool_calls"
            assert found["content"] == ""
        else:
            assert found["content"] == answer and found["end"] == "stop", (name, found)


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_thought_the_answer_is_content(tmp_path: Path, kind: str) -> None:
    folder = tokenizer_folder(tmp_path, kind)
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    for template, extra in ((PLAIN, {}), (HYBRID, {}), (OPENED, off)):
        for name, (fields, answer) in some_of(kind).items():
            with running(saying(folder, answer, template)) as rig:
                found = both(rig, **fields, **extra)
            assert found["thought"] == "", (name, found)
            if name in ("required", "named"):
                assert found["calls"] == [("add", '{"n": 4}')] and found["content"] == ""
            else:
                assert found["content"] == answer, (name, found)


@pytest.mark.parametrize("kind", KINDS)
def test_thoughts_and_calls_are_read_on_every_tokenizer(tmp_path: Path, kind: str) -> None:
    folder = tokenizer_folder(tmp_path, kind)
    said = f"<think>\nSum.\n</think>\n\nI add.\n{CALL}"
    with running(saying(folder, said, PLAIN)) as rig:
        found = both(rig, tools=TOOLS)
        assert found == {
            "content": "I add.",
            "thought": "Sum.",
            "calls": [("add", '{"n": 4}')],
            "end": "tool_calls",
        }
        # Without tools the tags of calls are text, or hidden where they are special tokens.
        shown = both(rig)["content"]
        assert ("<tool_call>" in shown) == (kind != "special") and '"n": 4' in shown


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_call_is_content_on_every_tokenizer(tmp_path: Path, kind: str) -> None:
    said = 'Look: <tool_call>{"city": "Rome"}</tool_call> so'
    shown = said if kind != "special" else 'Look: {"city": "Rome"} so'
    with running(saying(tokenizer_folder(tmp_path, kind), said, PLAIN)) as rig:
        assert both(rig, tools=TOOLS)["content"] == shown


@pytest.mark.parametrize("kind", KINDS)
def test_special_tags_are_shown_to_who_asks_for_them(tmp_path: Path, kind: str) -> None:
    said = 'Look: <tool_call>{"city": "Rome"}</tool_call> so'
    with running(saying(tokenizer_folder(tmp_path, kind), said, PLAIN)) as rig:
        assert both(rig, tools=TOOLS, skip_special_tokens=False)["content"] == said


def noise(path: Any) -> dict[int, float]:
    word = hash(tuple(path)) & ((1 << 62) - 1)
    return {**{i: 1.0 + (word >> (i % 50) & 3) for i in range(32, 127)}, 10: 1.0, EOS: 8.0}


@pytest.mark.parametrize("end", [8.0, 0.01])
def test_a_thought_without_end_leaves_room_for_the_answer(end: float) -> None:
    llm = scripted(lambda path: {**noise(path), EOS: end}, vocab_size=130, chat_template=OPENED)
    with running(llm) as rig:
        for name in ("json_schema", "guided_choice", "required"):
            found = both(rig, seed=5, max_tokens=200, **GRAMMARS[name][0])
            if name == "required":
                assert set(json.loads(found["calls"][0][1])) == {"n"}
            elif name == "json_schema":
                assert set(json.loads(found["content"])) == {"n"}
            else:
                assert found["content"] in ("three", "four")


def test_a_forced_call_that_is_cut_leaves_no_content() -> None:
    for template in (PLAIN, OPENED):
        llm = scripted(noise, vocab_size=130, chat_template=template)
        with running(llm) as rig:
            for limit in range(1, 40, 3):
                found = both(rig, tools=TOOLS, tool_choice="required", seed=1, max_tokens=limit)
                assert found["content"] == "" and found["end"] == "length"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("said", "new", "thought", "content"),
    [
        ("<think>abc", " d</think>e", " d", "e"),
        ("<think>abc</think>", "e", "", "e"),
        ("Hello ", "world", "", "world"),
    ],
)
def test_a_continued_message_is_read_on_from_its_end(
    tmp_path: Path, kind: str, said: str, new: str, thought: str, content: str
) -> None:
    folder = tokenizer_folder(tmp_path, kind)
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if not loop.last %}|{% endif %}"
        "{% endfor %}"
    )
    messages = [*ASK, {"role": "assistant", "content": said}]
    with running(saying(folder, said + new, template)) as rig:
        found = both(
            rig, messages=messages, continue_final_message=True, add_generation_prompt=False
        )
    assert (found["thought"], found["content"]) == (thought, content)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": FORMAT}, "response_format"),
        ({"guided_regex": "[0-9]{3}!"}, "guided_regex"),
        ({"structured_outputs": {"choice": ["7!", "8!"]}}, "structured_outputs"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tools"),
    ],
)
def test_a_dead_end_is_an_error_of_the_grammar(
    fields: dict[str, Any], param: str, stream: bool
) -> None:
    with running(scripted(lambda path: {ord("7"): 1.0}, vocab_size=130)) as rig:
        body = {"messages": ASK, "max_tokens": 50, "stream": stream, **fields}
        if stream:
            error = rig.events("/v1/chat/completions", body)[-1]["error"]
        else:
            status, reply, _ = rig.call("POST", "/v1/chat/completions", body)
            assert status == 400
            error = reply["error"]
    assert error["param"] == param and error["type"] == "invalid_request_error"
    assert "dead end" in error["message"] and "NaN" not in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_json": "{"}, "guided_json"),
        ({"structured_outputs": {"grammar": "nonsense((("}}, "structured_outputs"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"guided_regex": "a", "allowed_token_ids": [65]}, "allowed_token_ids"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        ({"stop_token_ids": [9999]}, "stop_token_ids"),
        ({"logit_bias": {"9999": 1}}, "logit_bias"),
        ({"messages": [{"role": "user", "content": "x" * 9000}]}, "messages"),
        ({"chat_template_kwargs": {"messages": []}}, "messages"),
    ],
)
def test_errors_name_the_clients_own_field(fields: dict[str, Any], param: str) -> None:
    with running(scripted(noise, vocab_size=130, model_len=4096)) as rig:
        status, reply, _ = rig.call(
            "POST", "/v1/chat/completions", {"messages": ASK, "max_tokens": 30, **fields}
        )
    assert status == 400 and reply["error"]["param"] == param, reply
