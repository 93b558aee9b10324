"""The bodies that agents' clients send, over a model that answers right: each gets its answer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from server_rig import replying, running, scripted

TURNS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}|{% endfor %}"
)
TEMPLATES = {
    "plain": "{{ tools or '' }}" + TURNS + "<assistant>",
    "thinking": "{{ tools or '' }}" + TURNS + "<assistant>\n<think>\n",
    "no place for tools": TURNS + "<assistant>",
}
THOUGHT = 'Observation: <tool_call>{"name": "add"}?'


def text(said: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": said}]


def tool(name: str, properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    function = {"name": name, "description": "Does it.", "parameters": parameters, **more}
    return {"type": "function", "function": function}


NUMBERS = {"a": {"type": "integer", "description": "one"}, "b": {"type": "integer"}}
PERSON = {"name": {"title": "Name", "type": "string"}, "age": {"type": "integer"}}
STOPS = ["Observation:", "Calling tools:"]
USER = [{"role": "user", "content": "2 and 3?"}]


def form(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    schema = {
        "properties": properties,
        "required": list(properties),
        "title": "P",
        "type": "object",
    }
    wanted = {"name": "P", "schema": schema, **more}
    return {"response_format": {"type": "json_schema", "json_schema": wanted}}


ADD = ("add", {"a": 2, "b": 3})
ANN = {"name": "Ann", "age": 30}
# What is sent, and what has to come back: a call, or JSON in the content.
BODIES: dict[str, tuple[dict[str, Any], Any]] = {
    "smolagents ToolCallingAgent": (
        {
            "messages": [
                {"role": "system", "content": text("You solve tasks.")},
                {"role": "user", "content": text("New task:\n2 and 3?")},
                {"role": "assistant", "content": text("Calling tools:\n[{'id': 'R1qGFGC46'}]")},
                {"role": "user", "content": text("Observation:\n5")},
            ],
            "stop": STOPS,
            "tool_choice": "required",
            "tools": [tool("add", NUMBERS), tool("final_answer", {"answer": {"type": "string"}})],
        },
        ("final_answer", {"answer": "Observation: five"}),
    ),
    "smolagents CodeAgent, structured": (
        {
            "messages": [{"role": "user", "content": text("New task:\n2 and 3?")}],
            "stop": [*STOPS, "</code>"],
            **form({"thought": {"type": "string"}, "code": {"type": "string"}}, strict=True),
        },
        {"thought": "Observation: I add.", "code": "print(2 + 3)</code>"},
    ),
    "langchain function calling": (
        {
            "messages": USER,
            "parallel_tool_calls": False,
            "tool_choice": {"type": "function", "function": {"name": "add"}},
            "tools": [tool("add", NUMBERS)],
        },
        ADD,
    ),
    "langchain bind_tools": ({"messages": USER, "tools": [tool("now", {})]}, ("now", {})),
    "langchain json_schema": ({"messages": USER, **form(PERSON, strict=True)}, ANN),
    "llm schema": ({"messages": USER, **form(PERSON)}, ANN),
    "llm tools": ({"messages": USER, "tools": [tool("add", NUMBERS)]}, ADD),
    "instructor TOOLS": (
        {
            "messages": USER,
            "tool_choice": {"type": "function", "function": {"name": "P"}},
            "tools": [tool("P", PERSON, strict=True)],
        },
        ("P", ANN),
    ),
    "instructor JSON": ({"messages": USER, "response_format": {"type": "json_object"}}, ANN),
}


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("client", BODIES)
def test_a_client_gets_its_answer(client: str, template: str) -> None:
    body, wanted = BODIES[client]
    said = json.dumps(wanted)
    if isinstance(wanted, tuple):
        called = json.dumps({"name": wanted[0], "arguments": wanted[1]})
        said = f"<tool_call>\n{called}\n</tool_call>"
    opening = "\n<think>\n" * (template == "thinking")
    thought = THOUGHT * bool(opening)
    script = replying(opening + f"{thought}\n</think>\n\n" * bool(opening) + said)
    with running(scripted(script, chat_template=TEMPLATES[template])) as rig:
        choice = rig.post("/v1/chat/completions", body)["choices"][0]
        events = rig.events("/v1/chat/completions", {**body, "stream": True})
    message = choice["message"]
    deltas = [event["choices"][0]["delta"] for event in events]
    streamed = "".join(delta.get("content") or "" for delta in deltas)
    assert message.get("reasoning_content", "") == thought
    if isinstance(wanted, tuple):
        (call,) = message["tool_calls"]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == wanted
        assert choice["finish_reason"] == "tool_calls" and not message["content"] and not streamed
    else:
        assert json.loads(message["content"]) == wanted and streamed == message["content"]
        assert choice["finish_reason"] == "stop"
