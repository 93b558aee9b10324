"""The server as a process: it says where it listens, drains at SIGTERM, and leaves with 0."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from server_rig import counting, letters, running, scripted, slowly

PROGRAM = """
import sys, time
from cotrt import LLM
from cotrt.testing import ScriptedModel
import cotrt, cotrt.cli

def slow(ids):
    time.sleep(0.01)
    return {97 + len(ids) % 26: 1.0}

REAL = LLM
cotrt.LLM = lambda model, **options: REAL(
    ScriptedModel(slow, vocab_size=300, eos_token_id=0), kv_cache_memory_bytes=1 << 18, **options
)
sys.exit(cotrt.cli.main(["serve", *sys.argv[1:]]))
"""


@contextmanager
def serving(repository: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "a-model", "--port", "0", *flags],
        cwd=repository,
        env={**os.environ, "COTRT_API_KEY": "sk-env", "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    log: list[str] = []
    try:
        for line in process.stderr:
            log.append(line)
            if match := re.search(r"serving a-model on http://127.0.0.1:(\d+)", line):
                break
        else:
            pytest.fail("".join(log))
        drain = threading.Thread(target=lambda: log.extend(process.stderr))
        drain.start()
        yield process, int(match[1])
        assert process.wait(20) == 0, "".join(log)
        drain.join()
        assert "Traceback" not in "".join(log)
        assert "sk-env" not in "".join(log) and "sk-flag" not in "".join(log)
        assert '"path": "/v1/completions"' in "".join(log)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def post(port: int, body: dict[str, object]) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    headers = {"content-type": "application/json", "authorization": "Bearer sk-env"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    return connection.getresponse()


def test_running_streams_end_whole_before_the_process_does(repository: Path) -> None:
    with serving(repository, "--api-key", "sk-flag") as (process, port):
        reply = post(port, {"prompt": "a", "max_tokens": 60, "stream": True})
        reply.readline()
        process.send_signal(signal.SIGINT)
        text = reply.read().decode()
        assert text.rstrip().endswith("data: [DONE]") and '"length"' in text


def test_what_runs_too_long_is_cut_at_the_deadline(repository: Path) -> None:
    with serving(repository, "--shutdown-timeout", "1") as (process, port):
        reply = post(port, {"prompt": "a", "max_tokens": 100_000, "stream": True})
        reply.readline()
        process.send_signal(signal.SIGTERM)
        text = reply.read().decode()
        assert '"code":"shutting_down"' in text and 'finish_reason":"' not in text


def test_a_second_interrupt_ends_running_streams_with_an_error(repository: Path) -> None:
    with serving(repository, "--shutdown-timeout", "300") as (process, port):
        reply = post(port, {"prompt": "a", "max_tokens": 100_000, "stream": True})
        reply.readline()
        process.send_signal(signal.SIGINT)
        refused = post(port, {"prompt": "b"})  # it may come before the signal has been seen
        while refused.status == 200:
            refused = post(port, {"prompt": "b"})
        assert refused.status == 503 and b'"code":"shutting_down"' in refused.read()
        process.send_signal(signal.SIGINT)
        text = reply.read().decode()
        assert '"code":"shutting_down"' in text and text.rstrip().endswith("data: [DONE]")


def test_a_second_interrupt_waits_for_no_client_that_does_not_read(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with running(scripted(letters), shutdown_timeout_s=300) as rig:
        asked = {"prompt": "a", "max_tokens": 1000, "n": 8, "stream": True, "logprobs": 20}
        stalled = rig.open("/v1/completions", asked)
        rig.wait_until(lambda: rig.llm.metrics["generated_tokens"] == 8000, 60.0)
        assert rig.service.admission.num_admitted == 8  # they lie in buffers that are full
        for _ in range(2):
            rig.server.handle_exit(signal.SIGINT, None)
    stalled.close()
    assert [r for r in caplog.records if r.levelname == "ERROR"] == []


def test_a_draining_server_answers_that_it_is() -> None:
    with running(scripted(slowly(0.004, counting)), shutdown_timeout_s=60) as rig:
        kept = http.client.HTTPConnection("127.0.0.1", rig.port, timeout=20)
        kept.request("GET", "/health")
        assert kept.getresponse().read() == b'{"status":"ok"}'
        link = rig.open("/v1/completions", {"prompt": "a", "max_tokens": 60_000, "stream": True})
        rig.wait_until(lambda: rig.llm.metrics["running"] == 1)
        rig.server.should_exit = True
        rig.wait_until(lambda: rig.service.admission.is_draining)
        kept.request("GET", "/health")
        reply = kept.getresponse()
        assert reply.status == 503 and b"shutting_down" in reply.read()
        kept.close()
        branches = "/v1/branches"
        for path, body in [("/v1/completions", {"prompt": "a"}), (branches, {"prompt": "a"})]:
            status, told, headers = rig.call("POST", path, body)
            assert status == 503 and told["error"]["code"] == "shutting_down"
            assert headers["retry-after"] == "5"
        assert rig.call("GET", "/health")[0] == 503
        assert rig.get("/v1/models")["data"]  # what costs nothing is still told
        link.close()


def test_a_port_in_use_is_told_before_the_model_is_loaded(repository: Path) -> None:
    loud = PROGRAM.replace("REAL(", "print('loading') or REAL(")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-c", loud, "a-model", "--port", str(port)],
            cwd=repository,
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == 1 and done.stdout == ""
    assert f"cannot listen on 127.0.0.1, port {port}" in done.stderr
    assert "--port" in done.stderr and "Traceback" not in done.stderr
