"""The server as a process: it says where it listens, drains at SIGTERM, and leaves with 0."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

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
