"""`cotrt.Client` itself: what it refuses at the call, whom it cannot reach, how it ends."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from isolation import shared_fixture
from pydantic import ValidationError
from server_rig import Rig, letters, running, scripted

import cotrt
from cotrt import SamplingParams


@shared_fixture()
def rig() -> Iterator[Rig]:
    with running(scripted(letters)) as made:
        yield made


@pytest.mark.parametrize(
    "asked",
    [{"max_tokens": -1}, {"temperature": -1}, {"top_k": "3"}, {"nonsense": 1}, {"n": 2}],
)
def test_bad_sampling_is_refused_at_the_call_as_locally(rig: Rig, asked: dict[str, Any]) -> None:
    local, remote = rig.llm.branch("abc"), cotrt.Client(rig.url).branch("abc")
    steps = rig.llm.metrics["steps"]
    with pytest.raises(ValueError) as ours:
        local.generate(**asked)
    with pytest.raises(ValueError) as theirs:
        remote.generate(**asked)
    assert type(theirs.value) is type(ours.value) and str(theirs.value) == str(ours.value)
    with pytest.raises(ValueError), remote.fork(2) as branches:
        branches.generate([None, SamplingParams(**asked)])
    with pytest.raises(cotrt.InvalidRequestError, match="not dict"):
        remote.generate({"max_tokens": 1})
    assert rig.llm.metrics["steps"] == steps  # nothing had started
    remote.prune()


def test_explicit_params_are_taken_as_they_are(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    greedy = SamplingParams(temperature=0.0)
    monkeypatch.setattr(rig.service.runtime, "defaults", greedy)
    asked = SamplingParams(max_tokens=30, seed=3, stop=["q"])
    local, remote = rig.llm.branch("abc"), cotrt.Client(rig.url).branch("abc")
    sampled = local.generate(asked).result()
    assert remote.generate(asked).result() == sampled
    again = [branch.truncate(3).generate(max_tokens=30).result() for branch in (local, remote)]
    assert again[0] == again[1] != sampled
    remote.prune()


def test_a_url_that_openai_clients_use_is_one(rig: Rig) -> None:
    for end in ("", "/", "/v1", "/v1/"):
        assert cotrt.Client(rig.url + end).models() == list(rig.service.names)


def test_a_closed_client_says_so(rig: Rig) -> None:
    with cotrt.Client(rig.url) as client:
        branch = client.branch("abc")
        generation = branch.generate(max_tokens=5)
    with pytest.raises(cotrt.InvalidRequestError, match=f"{rig.url} was closed"):
        branch.extend("x")
    assert len(generation.result(10).token_ids) == 5
    client.close()
    cotrt.Client(rig.url).branches().prune()


def assert_unreachable(url: str, what: str) -> None:
    client = cotrt.Client(url, timeout=10)
    for call in (client.models, lambda: client.branch("x")):
        with pytest.raises(cotrt.CotrtError, match=what) as caught:
            call()
        assert isinstance(caught.value, ConnectionError) and url in str(caught.value)


def test_nobody_there_is_told_with_the_url() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    assert_unreachable(f"http://127.0.0.1:{port}", "is it running")
    assert_unreachable(f"https://127.0.0.1:{port}", "is it running")


def test_a_server_without_tls_is_told_from_none(rig: Rig) -> None:
    assert_unreachable(f"https://127.0.0.1:{rig.port}", "say http://")


def test_whoever_hangs_up_or_speaks_no_http_is_named() -> None:
    answers = iter([b"", b"", b"SSH-2.0-x\r\n\r\n", b"SSH-2.0-x\r\n\r\n"])
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            for said in answers:
                link, _ = listener.accept()
                with link:
                    link.recv(65536)
                    link.sendall(said)

        thread = threading.Thread(target=answer)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert_unreachable(url, "the connection to")
        assert_unreachable(url, "the connection to")
        thread.join()


def test_what_is_no_json_is_no_cotrt_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            link, _ = listener.accept()
            with link:
                link.recv(65536)
                link.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n<ok>")

        thread = threading.Thread(target=answer)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(cotrt.CotrtError, match=f"{url}/v1/models answered what is no JSON"):
            cotrt.Client(url).models()
        thread.join()


def test_a_client_needs_no_torch(rig: Rig, repository: Path) -> None:
    code = f"""
import sys, cotrt
with cotrt.Client({rig.url!r}) as client, client.branch("abc").fork(2) as branches:
    branches.generate(cotrt.SamplingParams(max_tokens=3, seed=1)).result()
    branches.extend(["x", "y"])
    try:
        branches[0].generate(max_tokens=-1)
    except ValueError:
        print(branches[0].decode(0, 3), "torch" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=repository, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "abc False\n", done.stderr


def test_a_validation_error_names_the_field(rig: Rig) -> None:
    branch = cotrt.Client(rig.url).branch("abc")
    with pytest.raises(ValidationError, match=r"(?s)max_tokens.*\[0, 2147483647\]"):
        branch.generate(max_tokens=-1)
    branch.prune()
