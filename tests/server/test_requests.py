"""What requests mean and which are refused: lengths, log-probabilities, limits, odd bodies."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from isolation import shared_fixture
from server_rig import Rig, counting, letters, running, scripted
from what_is_kept import forget_peak, peak_bytes

from cotrt.models import chat_template

MESSAGES = [{"role": "user", "content": "hi"}]


@shared_fixture()
def rig() -> Iterator[Rig]:
    with running(scripted(letters, model_len=128, max_num_seqs=64)) as made:
        yield made


@pytest.mark.parametrize(
    ("limits", "tokens"),
    [
        ({}, None),
        ({"max_tokens": None}, None),
        ({"max_tokens": 1}, 1),
        ({"max_tokens": 0}, 0),
        ({"max_completion_tokens": 5}, 5),
        ({"max_tokens": 3, "max_completion_tokens": 5}, 5),
        ({"max_tokens": 10**9}, None),
    ],
)
def test_chat_without_a_limit_fills_the_context(rig: Rig, limits: Any, tokens: int | None) -> None:
    reply = rig.post("/v1/chat/completions", {"messages": MESSAGES, **limits})
    prompt = reply["usage"]["prompt_tokens"]
    wanted = 128 - prompt if tokens is None else tokens
    assert reply["usage"]["completion_tokens"] == wanted
    assert reply["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize(
    ("limits", "tokens"),
    [({}, 16), ({"max_tokens": None}, 16), ({"max_tokens": 1}, 1), ({"max_tokens": 0}, 0)],
)
def test_completions_make_16_tokens_unless_told(
    rig: Rig, limits: Any, tokens: int, echo: bool
) -> None:
    reply = rig.post("/v1/completions", {"prompt": "ab\n1", "echo": echo, **limits})
    assert reply["usage"]["completion_tokens"] == tokens
    text = reply["choices"][0]["text"]
    assert len(text) == tokens + 4 * echo
    assert text.startswith("ab\n1") == echo


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 5])
@pytest.mark.parametrize("count", [0, 1, 5])
@pytest.mark.parametrize("echo", [False, True])
def test_completion_logprobs_have_openais_shape(
    rig: Rig, echo: bool, count: int, max_tokens: int, stream: bool
) -> None:
    asked = {"prompt": "line\n12", "echo": echo, "logprobs": count, "seed": 3}
    asked["max_tokens"] = max_tokens
    if stream:
        parts = [e["choices"][0] for e in rig.events("/v1/completions", {**asked, "stream": True})]
        text = "".join(part["text"] for part in parts)
        found: dict[str, list[Any]] = {}
        for part in parts:
            for key, values in (part["logprobs"] or {}).items():
                found.setdefault(key, []).extend(values)
        whole = rig.post("/v1/completions", asked)["choices"][0]
        assert whole["text"] == text
        assert {k: v for k, v in (whole["logprobs"] or {}).items() if v} == {
            k: v for k, v in found.items() if v
        }
    else:
        choice = rig.post("/v1/completions", asked)["choices"][0]
        text, found = choice["text"], choice["logprobs"] or {}
    if not text:
        return
    assert "".join(found["tokens"]) == text
    assert len(found["tokens"]) == max_tokens + 7 * echo
    offsets = [sum(map(len, found["tokens"][:i])) for i in range(len(found["tokens"]))]
    assert found["text_offset"] == offsets
    assert (found["token_logprobs"][0] is None) == echo
    for token, value, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"]):
        if value is not None:
            assert top[token] == value
            assert count <= len(top) <= count + 1
            assert len(top) >= 1


@pytest.mark.parametrize(("top", "status"), [(None, 200), (0, 200), (5, 200), (21, 400), (-1, 400)])
@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs(rig: Rig, top: int | None, status: int, stream: bool) -> None:
    asked = {"messages": MESSAGES, "logprobs": True, "top_logprobs": top, "max_tokens": 4}
    if status != 200:
        found, reply, _ = rig.call("POST", "/v1/chat/completions", {**asked, "stream": stream})
        assert found == status and reply["error"]["param"] == "top_logprobs"
        return
    if stream:
        choices = [
            e["choices"][0] for e in rig.events("/v1/chat/completions", {**asked, "stream": True})
        ]
        content = [x for c in choices if c["logprobs"] for x in c["logprobs"]["content"]]
        text = "".join(c["delta"].get("content") or "" for c in choices)
    else:
        choice = rig.post("/v1/chat/completions", asked)["choices"][0]
        content, text = choice["logprobs"]["content"], choice["message"]["content"]
    assert "".join(entry["token"] for entry in content) == text
    for entry in content:
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert (top or 0) <= len(entry["top_logprobs"]) <= (top or 0) + 1
        if top:
            assert entry["token"] in [each["token"] for each in entry["top_logprobs"]]


BAD = [
    ("temperature", "NaN"),
    ("temperature", "Infinity"),
    ("temperature", '"0.5"'),
    ("temperature", "true"),
    ("top_p", "NaN"),
    ("top_p", "0"),
    ("top_p", "1.1"),
    ("presence_penalty", "NaN"),
    ("frequency_penalty", "9"),
    ("n", "0"),
    ("n", "-1"),
    ("n", "1.5"),
    ("n", "1000000"),
    ("max_tokens", "-1"),
    ("max_tokens", "1000000000000"),
    ("logprobs", "-1"),
    ("logprobs", "1000000"),
    ("prompt_logprobs", "-1"),
    ("top_k", "-2"),
    ("seed", str(2**70)),
    ("stop", '""'),
    ("stop", '["a", ""]'),
    ("stop", json.dumps(["x"] * 65)),
    ("logit_bias", '{"a": 1}'),
    ("logit_bias", '{"5": 101}'),
    ("logit_bias", '{"99999": 1}'),
    ("prompt", "[]"),
    ("prompt", "[[]]"),
    ("prompt", '[1, "a"]'),
    ("prompt", "[99999]"),
    ("prompt", "[-1]"),
    ("prompt", '{"a": 1}'),
    ("prompt", '"\\ud800"'),
    ("unknown_field", "1"),
    ("stream", '"yes"'),
    ("stream_options", '{"include_usage": true}'),
    ("suffix", '"x"'),
    ("best_of", "3"),
]


def body_with(field: str, value: str) -> bytes:
    fields = {"prompt": '"a"', "max_tokens": "1", field: value}
    return ("{" + ", ".join(f'"{k}": {v}' for k, v in fields.items()) + "}").encode()


@pytest.mark.parametrize(("field", "value"), BAD, ids=lambda text: str(text)[:30])
def test_a_bad_value_is_a_400_in_openais_shape(rig: Rig, field: str, value: str) -> None:
    status, reply, _ = rig.call("POST", "/v1/completions", raw=body_with(field, value))
    assert status == 400, reply
    assert set(reply["error"]) == {"message", "type", "param", "code"}
    assert reply["error"]["type"] == "invalid_request_error"
    assert rig.post("/v1/completions", {"prompt": "a", "max_tokens": 1})["choices"]


BROKEN = [
    (b"", 400),
    (b"{", 400),
    (b"[]", 400),
    (b"null", 400),
    (b'"x"', 400),
    (b"\xff\xfe", 400),
    (b'{"prompt": "' + b"a" * (9 << 20) + b'"}', 413),
    (b"[" * 100_000, 400),
    (b'{"prompt": ' + b"[" * 500 + b"]" * 500 + b"}", 400),
    (b'{"n": ' + b"9" * 5000 + b"}", 400),
]


@pytest.mark.parametrize(("raw", "status"), BROKEN, ids=range(len(BROKEN)))
def test_a_broken_body_is_a_4xx(rig: Rig, raw: bytes, status: int) -> None:
    found, reply, _ = rig.call("POST", "/v1/completions", raw=raw)
    assert found == status and reply["error"]["message"]


def test_no_bad_body_takes_a_second_or_50_mb(rig: Rig) -> None:
    """Seconds of CPU, client included: where one is let through, some would take minutes."""
    forget_peak()
    resident = peak_bytes()
    for raw in [*(body_with(*bad) for bad in BAD), *(raw for raw, _ in BROKEN)]:
        began = time.process_time()
        status, _, _ = rig.call("POST", "/v1/completions", raw=raw)
        assert 400 <= status < 500
        assert time.process_time() - began < 1.0, raw[:80]
    assert peak_bytes() - resident < 50 << 20


def test_a_wrong_content_type_is_a_415(rig: Rig) -> None:
    status, reply, _ = rig.call(
        "POST", "/v1/completions", {"prompt": "a"}, {"content-type": "text/plain"}
    )
    assert status == 415 and reply["error"]


def test_unknown_routes_and_methods_are_json_errors(rig: Rig) -> None:
    for method, path, wanted in [
        ("GET", "/nope", 404),
        ("GET", "/v1/models/", 404),
        ("GET", "//v1/models", 404),
        ("GET", "/V1/models", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("OPTIONS", "/v1/models", 405),
    ]:
        status, reply, _ = rig.call(method, path)
        assert (status, bool(reply["error"]["message"])) == (wanted, True), (method, path)


def test_a_request_cannot_bring_a_template(rig: Rig) -> None:
    loop = "{% for a in range(100000) %}{% for b in range(100000) %}x{% endfor %}{% endfor %}"
    for extra in (
        {"chat_template": loop},
        {"chat_template_kwargs": {"chat_template": loop}},
        {"chat_template_kwargs": {"messages": []}},
        {"chat_template_kwargs": {"add_generation_prompt": False}},
    ):
        status, reply, _ = rig.call(
            "POST", "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1, **extra}
        )
        assert status == 400 and "template" in reply["error"]["message"]


def test_a_models_own_endless_template_ends_and_leaves_the_server_well() -> None:
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with running(scripted(letters, chat_template=loop)) as rig:
        status, reply, _ = rig.call("POST", "/v1/chat/completions", {"messages": MESSAGES})
        assert status == 400 and "template" in reply["error"]["message"]
        assert rig.get("/health") == {"status": "ok"}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize", "/v1/branches"])
def test_health_answers_while_a_template_is_rendered(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end, ended_by_itself = threading.Event(), threading.Event(), threading.Event()
    render = chat_template.render

    def slow_render(*args: Any, **kwargs: Any) -> str:
        begun.set()
        if not may_end.wait(10):
            ended_by_itself.set()
        return render(*args, **kwargs)

    monkeypatch.setattr(chat_template, "render", slow_render)
    with running(scripted(letters, model_len=64)) as rig:
        asked = {"messages": MESSAGES}
        client = threading.Thread(target=rig.post, args=(path, asked))
        client.start()
        assert begun.wait(10)
        assert rig.get("/health") == {"status": "ok"}
        # On the event loop the rendering would have had to end first.
        assert not ended_by_itself.is_set()
        may_end.set()
        client.join()


def test_content_may_be_text_parts_or_null(rig: Rig) -> None:
    asked = {"max_tokens": 1, "return_token_ids": True}
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    whole = rig.post("/v1/chat/completions", {"messages": MESSAGES, **asked})
    split = rig.post(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": parts}], **asked}
    )
    assert whole["prompt_token_ids"] == split["prompt_token_ids"]
    rig.post("/v1/chat/completions", {"messages": [{"role": "user", "content": None}], **asked})
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    mixed = [*MESSAGES, {"role": "user", "content": [*parts, *image]}]
    for path in ("/v1/chat/completions", "/tokenize", "/v1/branches"):
        status, reply, _ = rig.call("POST", path, {"messages": mixed})
        message = reply["error"]["message"]
        assert status == 400 and reply["error"]["param"] == "messages"
        assert message.startswith(
            "messages[1].content: a part of type 'image_url'; only text parts are supported"
        )


def test_a_forced_call_without_tools_says_what_is_missing(rig: Rig) -> None:
    named = {"type": "function", "function": {"name": "f"}}
    for choice in ("required", named):
        asked = {"messages": MESSAGES, "tool_choice": choice}
        status, reply, _ = rig.call("POST", "/v1/chat/completions", asked)
        assert status == 400 and "the request has no tools" in reply["error"]["message"]
        assert reply["error"]["param"] == "tools"


@pytest.mark.parametrize("echo", [False, True])
def test_token_ids_of_prompts_come_whole_and_streamed(rig: Rig, echo: bool) -> None:
    asked = {"prompt": ["ab", "c"], "max_tokens": 3, "seed": 1, "n": 2, "echo": echo}
    asked["return_token_ids"] = True
    whole = rig.post("/v1/completions", asked)
    prompts = [choice["prompt_token_ids"] for choice in whole["choices"]]
    assert prompts == [[97, 98], [97, 98], [99], [99]]
    assert all(len(choice["token_ids"]) == 3 for choice in whole["choices"])
    streamed = {}
    for event in rig.events("/v1/completions", {**asked, "stream": True}):
        for choice in event["choices"]:
            if "prompt_token_ids" in choice:
                streamed[choice["index"]] = choice["prompt_token_ids"]
    assert [streamed[i] for i in range(4)] == prompts
    plain = rig.post("/v1/completions", {**asked, "return_token_ids": False})
    assert "prompt_token_ids" not in plain["choices"][0]


def test_tokenize_and_detokenize_are_inverse(rig: Rig) -> None:
    found = rig.post("/tokenize", {"prompt": "héllo", "return_token_strs": True})
    assert found["count"] == 5 and found["max_model_len"] == 128
    assert found["token_strs"] == list("héllo")
    assert rig.post("/detokenize", {"tokens": found["tokens"]}) == {"prompt": "héllo"}
    chat = rig.post("/tokenize", {"messages": MESSAGES})
    assert rig.post("/detokenize", {"tokens": chat["tokens"]})["prompt"].endswith("<assistant>")


def test_a_text_that_the_tokenizer_refuses_is_a_400(rig: Rig) -> None:
    status, reply, _ = rig.call("POST", "/v1/completions", {"prompt": "\u6f22"})
    assert status == 400 and "encoded" in reply["error"]["message"]


def test_stop_strings_are_cut_while_streaming() -> None:
    with running(scripted(counting)) as rig:
        for extra, tail in (({}, ""), ({"include_stop_str_in_output": True}, "mno")):
            asked = {"prompt": "a", "max_tokens": 30, "stop": ["mno", "zzz"], **extra}
            events = rig.events("/v1/completions", {**asked, "stream": True})
            text = "".join(e["choices"][0]["text"] for e in events)
            assert text == "bcdefghijkl" + tail
            assert events[-1]["choices"][0]["finish_reason"] == "stop"
            assert events[-1]["choices"][0]["stop_reason"] == "mno"
            assert rig.post("/v1/completions", asked)["choices"][0]["text"] == text
            assert rig.post("/v1/completions", asked)["usage"]["completion_tokens"] == 14


def test_more_than_the_server_can_hold_waits_or_is_refused() -> None:
    from server_rig import slowly

    with running(scripted(slowly(0.01), max_num_seqs=2), max_queue=2) as rig:
        status, reply, _ = rig.call("POST", "/v1/completions", {"prompt": "a", "n": 5})
        assert status == 400 and "5 outputs" in reply["error"]["message"]
        links = [rig.open("/v1/completions", {"prompt": "a", "n": 2, "max_tokens": 5000})]
        links.append(rig.open("/v1/completions", {"prompt": "a", "n": 2, "max_tokens": 5000}))
        rig.wait_until(lambda: rig.service.admission.num_admitted == 4)
        status, reply, headers = rig.call("POST", "/v1/completions", {"prompt": "a"})
        assert status == 429 and headers["retry-after"] == "1"
        assert reply["error"]["code"] == "queue_full"
        for link in links:
            link.close()
        rig.wait_until(rig.is_idle)
        rig.post("/v1/completions", {"prompt": "a", "max_tokens": 1})


def test_metrics_have_vllms_names_and_the_trees_own(rig: Rig) -> None:
    rig.post("/v1/completions", {"prompt": "metrics", "max_tokens": 3})
    text = rig.get("/metrics")
    for name in (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:prefix_cache_hits_total",
        "vllm:time_to_first_token_seconds_count",
        "vllm:inter_token_latency_seconds_count",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "cotrt:forks_total",
        "cotrt:copies_on_write_total",
        "cotrt:prunes_total",
        "cotrt:prompt_tokens_reused_total",
        "cotrt:recomputed_tokens_total",
    ):
        assert f"\n{name}{{" in text, name
    free = [line for line in text.splitlines() if line.startswith("cotrt:kv_blocks{")]
    total = sum(float(line.rpartition(" ")[2]) for line in free)
    assert total == rig.llm.memory().total


def test_every_reply_has_a_request_id(rig: Rig) -> None:
    _, _, headers = rig.call("GET", "/health", headers={"x-request-id": "mine-1"})
    assert headers["x-request-id"] == "mine-1"
    _, _, headers = rig.call("GET", "/health", headers={"x-request-id": 'bad id"'})
    assert len(headers["x-request-id"]) == 32


def test_browsers_of_named_origins_alone_are_let_in(rig: Rig) -> None:
    asked = {"origin": "https://a.example", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in rig.call("OPTIONS", "/v1/models", headers=asked)[2]
    with running(scripted(letters), allowed_origins=("https://a.example",)) as open_rig:
        status, _, headers = open_rig.call("OPTIONS", "/v1/completions", headers=asked)
        assert status == 200 and headers["access-control-allow-origin"] == "https://a.example"
        other = {**asked, "origin": "https://b.example"}
        assert open_rig.call("OPTIONS", "/v1/completions", headers=other)[0] == 400


def test_what_outgrows_the_pool_is_refused_with_the_numbers_and_others_are_served() -> None:
    options = {"kv_cache_memory_bytes": 8 * 16 * 4, "max_model_len": 512}
    with running(scripted(letters, **options)) as small:
        status, reply, _ = small.call("POST", "/v1/completions", {"prompt": "x" * 200})
        assert status == 400 and reply["error"]["code"] == "kv_cache_exhausted"
        assert "8" in reply["error"]["message"]
        grown = small.post("/v1/completions", {"prompt": "x" * 120, "max_tokens": 300})
        assert grown["choices"][0]["stop_reason"] == "kv_capacity"
        assert small.post("/v1/completions", {"prompt": "y" * 20})["choices"]
