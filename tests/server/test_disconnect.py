"""A client that goes away frees its work, at whatever point it goes."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from isolation import shared_fixture
from server_rig import Rig, counting, running, scripted, slowly
from what_is_kept import engine_tables, grown, living, resident_growth, table_lengths

LONG = {"prompt": "abc", "max_tokens": 2000}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2000}


@shared_fixture()
def rig() -> Iterator[Rig]:
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 64}
    with running(scripted(slowly(0.004, counting), **options)) as made:
        yield made


def assert_only_new_work_gets_tokens(rig: Rig) -> None:
    """In ten steps of another request the token counter moves by its ten tokens alone."""
    generated = rig.llm.metrics["generated_tokens"]
    reply = rig.post("/v1/completions", {"prompt": "other", "max_tokens": 10})
    assert reply["usage"]["completion_tokens"] == 10
    assert rig.llm.metrics["generated_tokens"] == generated + 10


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", LONG), ("/v1/chat/completions", CHAT)]
)
def test_gone_while_it_runs(rig: Rig, path: str, body: dict[str, object], stream: bool) -> None:
    link = rig.open(path, {**body, "n": 2, "stream": stream})
    rig.wait_until(lambda: rig.llm.metrics["running"] == 2)
    if stream:
        assert link.recv(10)
    link.close()
    rig.wait_until(rig.is_idle, 2.0)
    assert rig.llm.memory().in_use == 0
    assert_only_new_work_gets_tokens(rig)


def test_gone_while_it_waits_in_the_queue(rig: Rig) -> None:
    first = rig.open("/v1/completions", {**LONG, "n": 4})
    rig.wait_until(lambda: rig.llm.metrics["running"] == 4)
    others = [rig.open("/v1/completions", {**LONG, "stream": i % 2 == 0}) for i in range(6)]
    rig.wait_until(lambda: rig.llm.metrics["waiting"] == 6)
    for link in others:
        link.close()
    rig.wait_until(lambda: rig.llm.metrics["waiting"] == 0, 2.0)
    assert rig.llm.metrics["running"] == 4
    first.close()
    rig.wait_until(rig.is_idle, 2.0)
    assert rig.llm.memory().in_use == 0


def test_gone_during_prefill(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    model, before = rig.llm._runtime.engine.model, rig.llm.metrics
    run = model.run

    def run_slowly(step: Any) -> Any:
        time.sleep(0.02)
        return run(step)

    def computed() -> int:
        return rig.llm.metrics["prompt_tokens_computed"] - before["prompt_tokens_computed"]

    monkeypatch.setattr(model, "run", run_slowly)
    link = rig.open("/v1/completions", {"prompt": "x" * 4000, "max_tokens": 2000})
    rig.wait_until(computed)
    link.close()
    rig.wait_until(rig.is_idle, 2.0)
    assert rig.llm.memory().in_use == 0
    assert computed() < 4000  # which would be 63 steps
    assert rig.llm.metrics["generated_tokens"] == before["generated_tokens"]


def test_gone_before_the_body_is_there(rig: Rig) -> None:
    import socket

    for sent in (b"", b"{", b'{"prompt": "a", '):
        link = socket.create_connection(("127.0.0.1", rig.port))
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        link.sendall(f"{head}content-length: 500\r\n\r\n".encode() + sent)
        link.close()
    rig.wait_until(rig.is_idle)
    rig.post("/v1/completions", {"prompt": "a", "max_tokens": 1})


def test_many_come_and_go_without_a_traceback(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    links = [
        rig.open("/v1/completions", {**LONG, "stream": i % 3 > 0, "prompt": f"p{i}"})
        for i in range(30)
    ]
    for link in links:
        link.close()
    rig.wait_until(rig.is_idle, 5.0)
    assert rig.llm.memory().in_use == 0
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


def test_dropping_a_stream_of_several_outputs_stops_all_of_them_again_and_again() -> None:
    with running(scripted(slowly(0.001, counting), max_num_seqs=4)) as rig:

        def drop(turns: range) -> None:
            for turn in turns:
                asked = {**LONG, "prompt": "abc" * 20, "n": 4, "stream": True}
                link = rig.open("/v1/completions", asked)
                rig.wait_until(lambda: rig.llm.metrics["running"] == 4)
                if turn % 2:
                    assert link.recv(20)
                link.close()
                rig.wait_until(rig.is_idle, 2.0)
                if turn % 10 == 0:
                    assert_only_new_work_gets_tokens(rig)

        def kept() -> tuple[Counter[str], dict[str, int]]:
            service = rig.service
            tables = table_lengths(service, service.admission, service.branches, service.metrics)
            return living(), {**engine_tables(rig.llm), **tables}

        drop(range(20))

        def leaves_nothing() -> None:
            objects, tables = kept()
            drop(range(20, 100))
            # The thread of the last request may still be on its way out.
            rig.wait_until(lambda: not grown(kept()[0], objects, 80))
            assert not grown(kept()[1], tables, 80)

        # 64 KB kept of each round would be 5 MiB.
        most = 4 << 20
        assert resident_growth(leaves_nothing, enough=most) < most
        assert rig.llm.memory().in_use == 0
        assert rig.post("/v1/completions", {"prompt": "a", "max_tokens": 1})["choices"]


def test_a_body_that_does_not_come_is_given_up() -> None:
    import socket

    with running(scripted(counting), body_timeout_s=0.2) as rig:
        link = socket.create_connection(("127.0.0.1", rig.port), timeout=10)
        head = "POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        link.sendall(f"{head}content-length: 500\r\n\r\n{{".encode())
        assert b" 408 " in link.recv(65536)
        link.close()
