"""Structured outputs by the real client: formats, guided fields, forced tool calls, branches."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import openai
import pydantic
import pytest
from isolation import shared_fixture
from server_rig import EOS, Rig, running, scripted

import cotrt
from cotrt import SamplingParams, StructuredOutputs

HELLO = [{"role": "user", "content": "Hello"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
                "required": ["n"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("add", "sub")
]


class Person(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    age: int
    ok: bool


def noise(ids: Sequence[int]) -> Mapping[int, float]:
    word = hash(tuple(ids)) & ((1 << 62) - 1)
    weights = {i: 1.0 + (word >> (i % 50) & 7) for i in range(33, 127)}
    return {**weights, 32: 0.01, 10: 0.01, EOS: 30.0}


@shared_fixture()
def rig() -> Iterator[Rig]:
    with running(scripted(noise, vocab_size=130, model_len=2048)) as made:
        yield made


@pytest.fixture
def api(rig: Rig) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{rig.url}/v1", api_key="none", max_retries=0)


def test_the_client_parses_its_own_model_class(rig: Rig, api: openai.OpenAI) -> None:
    reply = api.chat.completions.parse(
        model=rig.service.names[0], messages=HELLO, response_format=Person, n=3
    )
    assert all(isinstance(choice.message.parsed, Person) for choice in reply.choices)
    assert all(choice.finish_reason == "stop" for choice in reply.choices)


def test_json_object_and_guided_fields(rig: Rig, api: openai.OpenAI) -> None:
    name = rig.service.names[0]

    def chat(**extra: Any) -> str:
        reply = api.chat.completions.create(
            model=name, messages=HELLO, max_tokens=1500, extra_body=extra
        )
        return reply.choices[0].message.content

    assert isinstance(json.loads(chat(response_format={"type": "json_object"})), dict)
    assert chat(guided_choice=["red", "blue"]) in ("red", "blue")
    assert re.fullmatch("[0-9]{4}", chat(guided_regex="[0-9]{4}"))
    assert chat(structured_outputs={"grammar": 'start: "a" | "b"'}) in ("a", "b")
    assert type(json.loads(chat(guided_json={"type": "integer", "maximum": 9}))) is int
    text = api.completions.create(
        model=name, prompt="x", extra_body={"structured_outputs": {"regex": "ab+c"}}, max_tokens=900
    )
    assert re.fullmatch("ab+c", text.choices[0].text)


def test_a_cut_object_says_length(rig: Rig, api: openai.OpenAI) -> None:
    reply = api.chat.completions.create(
        model=rig.service.names[0],
        messages=HELLO,
        max_tokens=4,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "person", "schema": Person.model_json_schema()},
        },
    )
    assert reply.choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "sub"}}])
def test_a_forced_tool_call_is_made(
    rig: Rig, api: openai.OpenAI, choice: Any, stream: bool
) -> None:
    asked = {"model": rig.service.names[0], "messages": HELLO, "tools": TOOLS}
    if stream:
        with api.chat.completions.stream(**asked, tool_choice=choice) as events:
            for _ in events:
                pass
            made = events.get_final_completion().choices[0]
    else:
        made = api.chat.completions.create(**asked, tool_choice=choice).choices[0]
    assert made.finish_reason == "tool_calls" and not made.message.content
    (call,) = made.message.tool_calls
    assert call.function.name in (("add", "sub") if choice == "required" else ("sub",))
    assert 0 <= json.loads(call.function.arguments)["n"] <= 9


@pytest.mark.parametrize(
    "extra",
    [
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_object"}, "guided_regex": "a"},
        {"guided_regex": "("},
        {"guided_json": "{"},
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        {"structured_outputs": {}},
        {"guided_regex": "a" * 70_000},
        {"guided_choice": []},
        {"guided_regex": "a", "ignore_eos": True},
        {"tool_choice": "required"},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "mul"}}},
    ],
)
def test_a_bad_grammar_is_a_400(rig: Rig, extra: dict[str, Any]) -> None:
    status, reply, _ = rig.call(
        "POST", "/v1/chat/completions", {"messages": HELLO, "max_tokens": 3, **extra}
    )
    assert status == 400, reply


def test_what_the_grammar_library_cannot_hold_is_a_400_on_every_route(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> None:
        raise cotrt.InvalidRequestError("this grammar is too large")

    branch = rig.post("/v1/branches", {"prompt": "x"})["id"]
    monkeypatch.setattr(rig.service.runtime, "_grammar", refuse)
    for path, body in [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": HELLO}),
        (f"/v1/branches/{branch}/generate", {}),
    ]:
        for stream in (False, True):
            asked = {**body, "guided_regex": "a+", "max_tokens": 3, "stream": stream}
            status, reply, _ = rig.call("POST", path, asked)
            assert status == 400, reply
            assert reply["error"]["message"] == "this grammar is too large"
            assert reply["error"]["type"] == "invalid_request_error"
    rig.call("DELETE", f"/v1/branches/{branch}")


def test_a_remote_fork_goes_on_inside_the_object(rig: Rig) -> None:
    client = cotrt.Client(rig.url)
    grammar = StructuredOutputs(json=Person.model_json_schema())
    with client.branch("x") as branch:
        first = branch.generate(SamplingParams(structured_outputs=grammar, max_tokens=5)).result()
        with branch.fork(3) as forks:
            rest = forks.generate(structured_outputs=grammar, max_tokens=500).result()
    for output in rest:
        Person.model_validate_json(first.text + output.text)
