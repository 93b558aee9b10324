"""A server in a thread, scripted models that say what a test wants, and plain HTTP."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from cotrt import LLM
from cotrt.server.options import ServerOptions
from cotrt.server.serving import Server
from cotrt.testing import ScriptedModel

EOS = 0
TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function.arguments | tojson }}</tool_call>{% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def counting(ids: Sequence[int]) -> Mapping[int, float]:
    """The letter by the position, for ever: a b c ... z a b ..."""
    return {97 + len(ids) % 26: 1.0}


def letters(ids: Sequence[int]) -> Mapping[int, float]:
    """Weights of the small letters that depend on every token before."""
    word = hash(tuple(ids)) & ((1 << 62) - 1)
    return {97 + i: 1.0 + (word >> 2 * i & 3) for i in range(26)}


def replying(
    text: str, after: str = "<assistant>"
) -> Callable[[Sequence[int]], Mapping[int, float]]:
    """`text` after the last `after`, then the end."""
    ids = [*map(ord, text), EOS]

    def next_probs(path: Sequence[int]) -> Mapping[int, float]:
        said = "".join(map(chr, path))
        at = len(said) - said.rfind(after) - len(after)
        return {ids[min(at, len(ids) - 1)]: 1.0}

    return next_probs


def slowly(
    seconds: float, next_probs: Callable[[Sequence[int]], Mapping[int, float]] = counting
) -> Callable[[Sequence[int]], Mapping[int, float]]:
    def wait(ids: Sequence[int]) -> Mapping[int, float]:
        time.sleep(seconds)
        return next_probs(ids)

    return wait


def scripted(
    next_probs: Callable[[Sequence[int]], Mapping[int, float]] = letters, **options: Any
) -> LLM:
    model = ScriptedModel(
        next_probs,
        vocab_size=options.pop("vocab_size", 1100),
        eos_token_id=EOS,
        max_model_len=options.pop("model_len", 1 << 16),
    )
    options = {"kv_cache_memory_bytes": 1 << 20, "chat_template": TEMPLATE, **options}
    return LLM(model, **options)


class Rig:
    """A running server: its engine, its address, and requests to it."""

    def __init__(self, server: Server, key: str = "") -> None:
        self.server = server
        self.service = server.service
        self.llm = server.service.llm
        self.port = server.port
        self.url = f"http://127.0.0.1:{server.port}"
        self.key = key

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] = {},
        raw: bytes | None = None,
    ) -> tuple[int, Any, Mapping[str, str]]:
        """Status, JSON (or text), headers in lower case."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        sent = {"content-type": "application/json", **headers}
        if self.key and "authorization" not in {name.lower() for name in sent}:
            sent["authorization"] = f"Bearer {self.key}"
        data = raw if raw is not None else None if body is None else json.dumps(body).encode()
        with contextlib.closing(connection):
            connection.request(method, path, data, sent)
            reply = connection.getresponse()
            text = reply.read()
        found = {name.lower(): value for name, value in reply.getheaders()}
        if found.get("content-type", "").startswith("application/json") and text:
            return reply.status, json.loads(text), found
        return reply.status, text.decode(), found

    def post(self, path: str, body: Any, **headers: str) -> Any:
        status, reply, _ = self.call("POST", path, body, headers)
        assert status in (200, 201), reply
        return reply

    def get(self, path: str) -> Any:
        status, reply, _ = self.call("GET", path)
        assert status == 200, reply
        return reply

    def events(self, path: str, body: Any) -> list[Any]:
        """All events of a stream; the last was [DONE]."""
        status, text, headers = self.call("POST", path, body)
        assert status == 200, text
        assert headers["content-type"].startswith("text/event-stream")
        blocks = [block for block in text.split("\n\n") if block]
        assert all(block.startswith("data: ") for block in blocks)
        assert blocks[-1] == "data: [DONE]"
        return [json.loads(block[6:]) for block in blocks[:-1]]

    def open(self, path: str, body: Any) -> socket.socket:
        """A request sent whole, its reply not read."""
        link = socket.create_connection(("127.0.0.1", self.port), timeout=10)
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            f"authorization: Bearer {self.key or 'none'}\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        link.sendall(head.encode() + data)
        return link

    def wait_until(self, ready: Callable[[], Any], seconds: float = 10.0) -> None:
        deadline = time.monotonic() + seconds
        while not ready():
            assert time.monotonic() < deadline, "it did not come to that"
            time.sleep(0.005)

    def is_idle(self) -> bool:
        metrics = self.llm.metrics
        return metrics["running"] == metrics["waiting"] == 0 == self.service.admission.num_admitted


@contextlib.contextmanager
def running(llm: LLM, **options: Any) -> Iterator[Rig]:
    """A server over `llm` on a free port; the LLM is closed at the end."""
    keys = options.get("api_keys", ())
    up = threading.Event()
    options = {"shutdown_timeout_s": 1, **options}
    server = Server(llm, ServerOptions(port=0, **options), lambda _: up.set())
    with llm:
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            assert up.wait(20), "the server did not start"
            yield Rig(server, keys[0] if keys else "")
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()
