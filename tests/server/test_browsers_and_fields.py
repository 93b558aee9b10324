"""What browsers' preflights ask for, and fields that this server does not know."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from isolation import shared_fixture
from server_rig import Rig, replying, running, scripted

ASK = [{"role": "user", "content": "Hi"}]
SDK = "authorization,content-type,x-stainless-arch,x-stainless-retry-count,x-of-tomorrow"


@shared_fixture()
def rig() -> Iterator[Rig]:
    with running(scripted(replying("Hello"))) as made:
        yield made


def preflight(rig: Rig, origin: str, headers: str) -> tuple[int, set[str], str | None]:
    status, _, found = rig.call(
        "OPTIONS",
        "/v1/chat/completions",
        headers={
            "origin": origin,
            "access-control-request-method": "POST",
            "access-control-request-headers": headers,
        },
    )
    allowed = found.get("access-control-allow-headers", "")
    names = {name.strip().lower() for name in allowed.split(",")}
    return status, names, found.get("access-control-allow-origin")


@pytest.mark.parametrize("origins", [("*",), ("https://app.example", "https://b.example")])
@pytest.mark.parametrize("headers", ["content-type", SDK, "x-anything"])
def test_an_allowed_origin_may_send_the_headers_that_it_asks_for(
    origins: tuple[str, ...], headers: str
) -> None:
    with running(scripted(), allowed_origins=origins) as rig:
        status, allowed, origin = preflight(rig, "https://app.example", headers)
        assert status == 200 and set(headers.split(",")) <= allowed
        assert origin in ("*", "https://app.example")
        if "*" not in origins:
            assert preflight(rig, "https://evil.example", headers)[2] is None


def test_without_allowed_origins_nothing_is_allowed(rig: Rig) -> None:
    assert preflight(rig, "https://app.example", SDK)[2] is None


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"colour": 1}, "colour", "unknown field"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown field"),
        (
            {"tools": [{"type": "function", "function": {"name": "f"}, "cache_control": {}}]},
            "tools[0].cache_control",
            "unknown field",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "examples": []}}]},
            "tools[0].function.examples",
            "unknown field",
        ),
        (
            {"tool_choice": {"type": "function", "function": {"name": "f", "x": 1}}},
            "tool_choice",
            "",
        ),
        ({"response_format": {"type": "text", "x": 1}}, "response_format.x", "unknown field"),
        ({"verbosity": "low"}, "verbosity", "not in this version"),
        ({"web_search_options": {}}, "web_search_options", "not in this version"),
        ({"functions": []}, "functions", "not in this version"),
        ({"audio": {"voice": "a"}}, "audio", "not in this version"),
    ],
)
def test_an_unknown_field_is_named_where_it_stands(
    rig: Rig, fields: dict[str, Any], param: str, words: str
) -> None:
    status, reply, _ = rig.call("POST", "/v1/chat/completions", {"messages": ASK, **fields})
    error = reply["error"]
    assert status == 400 and error["param"].startswith(param) and words in error["message"], error
    assert param in error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"stream": True, "stream_options": {"include_obfuscation": False}},
        {"stream": True, "stream_options": {"include_obfuscation": True, "include_usage": True}},
        {"prediction": {"type": "content", "content": "Hi"}},
        {"store": True, "safety_identifier": "a", "prompt_cache_key": "b"},
        {"logprobs": False, "top_logprobs": 0},
    ],
)
def test_fields_that_change_no_text_are_ignored(rig: Rig, fields: dict[str, Any]) -> None:
    body = {"messages": ASK, **fields}
    if fields.get("stream"):
        deltas = [
            e["choices"][0]["delta"]
            for e in rig.events("/v1/chat/completions", body)
            if e["choices"]
        ]
        assert "".join(delta.get("content") or "" for delta in deltas) == "Hello"
    else:
        message = rig.post("/v1/chat/completions", body)["choices"][0]["message"]
        assert message["content"] == "Hello"
