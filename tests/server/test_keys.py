"""API keys: which requests pass, that comparison takes constant time, that no key is logged."""

from __future__ import annotations

import ast
import inspect
import logging
import socket
import textwrap
from collections.abc import Iterator

import pytest
from isolation import shared_fixture
from server_rig import Rig, running, scripted

from cotrt.server import guard
from cotrt.server.routes import ROUTES

KEY = "sk-secret-1234567890"
PATHS = [api.path.replace("{name:path}", "x").replace("{id}", "x") for api in ROUTES]
GUARDED = sorted({path for path in PATHS if path not in ("/", "/health")})
ODD = ["//v1/models", "/V1/models", "/v1/models/", "/docs", "/health/", "//", "/%2e%2e/v1/models"]


@shared_fixture()
def rig() -> Iterator[Rig]:
    with running(scripted(), api_keys=("sk-other", KEY)) as made:
        yield made


@pytest.mark.parametrize("path", GUARDED + ODD)
def test_without_a_valid_key_every_method_of_a_guarded_path_is_401(rig: Rig, path: str) -> None:
    for method in ("GET", "POST", "DELETE", "PUT", "PATCH", "HEAD", "OPTIONS"):
        for given in ("", "Bearer", "Bearer ", f"Bearer {KEY[:-1]}", f"Basic {KEY}", KEY):
            headers = {"authorization": given} if given else {"authorization": "none"}
            status, reply, _ = rig.call(method, path, headers=headers)
            assert status == 401, (method, path, given)
            if method != "HEAD":
                assert reply["error"]["code"] == "invalid_api_key"
    status, _, _ = rig.call("GET", f"{path}?api_key={KEY}", headers={"authorization": "none"})
    assert status == 401


@pytest.mark.parametrize(
    "lines",
    [
        [b"Authorization: bearer " + KEY.encode()],
        [b"Authorization: Bearer \xc3\xa9\xff"],
        [b"Authorization: Bearer " + KEY.encode(), b"Authorization: Bearer " + KEY.encode()],
        [b"Authorization: Bearer  " + KEY.encode()],
        [b"X-Api-Key: " + KEY.encode()],
        [],
    ],
)
def test_odd_headers_are_401_never_500(rig: Rig, lines: list[bytes]) -> None:
    with socket.create_connection(("127.0.0.1", rig.port), timeout=10) as link:
        head = b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        link.sendall(head + b"".join(line + b"\r\n" for line in lines) + b"\r\n")
        reply = b""
        while part := link.recv(65536):
            reply += part
    assert reply.startswith(b"HTTP/1.1 401 ")
    assert b'{"error":{' in reply


def test_open_paths_and_both_keys_pass(rig: Rig) -> None:
    for path in ("/health", "/"):
        assert rig.call("GET", path, headers={"authorization": "none"})[0] == 200
    for key in (KEY, "sk-other"):
        headers = {"authorization": f"Bearer {key}"}
        assert rig.call("GET", "/v1/models", headers=headers)[0] == 200


def test_keys_are_compared_in_constant_time_and_all_of_them() -> None:
    source = inspect.getsource(guard.Guard._owner)
    assert "hmac.compare_digest" in source
    tree = ast.parse(textwrap.dedent(source))
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For)]
    assert not any(isinstance(n, (ast.Break, ast.Return)) for loop in loops for n in ast.walk(loop))


def test_keys_are_not_logged(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    rig.call("POST", f"/v1/completions?key={KEY}", {"prompt": KEY, "foo": 1})
    rig.call("GET", "/v1/models", headers={"authorization": f"Bearer {KEY}x"})
    rig.wait_until(lambda: "/v1/models" in caplog.text)
    assert "/v1/completions" in caplog.text
    assert KEY not in caplog.text and "sk-other" not in caplog.text
