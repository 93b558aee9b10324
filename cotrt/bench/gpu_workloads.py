"""W1 to W5 on cotrt and on peers, and what the host does in a step, on one GPU."""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from cotrt.bench.gpu_peers import PEERS
from cotrt.bench.workloads import FULL, TOY, Sizes, run, tokens

NAMES = ("W5", "W2", "W3", "W1", "W4")
# In the interpreter a program of a kernel takes milliseconds.
_INTERPRETED = Sizes((2, 4, 2), (10, 2, 2), (6, 1, 1, 2, 2), (1, 1, 4, 2), (4, 2), (4, 2, 2))


def open_llm(model: Any, *, toy: bool, on_gpu: bool) -> Any:
    """The LLM that the workloads run on."""
    from cotrt import LLM

    options: dict[str, Any] = {"max_num_seqs": 256, "seed": 1}
    if not on_gpu:
        options |= {"dtype": "float32", "attention_backend": "triton"}
    if toy:
        options |= {"kv_cache_memory_bytes": 64 << 20, "max_num_seqs": 8, "max_model_len": 256}
    else:
        options["gpu_memory_utilization"] = 0.5  # peers need the rest
    return LLM(model, device="cuda" if on_gpu else "cpu", **options)


def workloads(llm: Any, *, toy: bool, on_gpu: bool, repetitions: int) -> Iterator[dict[str, Any]]:
    """A record for each workload on cotrt."""
    from cotrt import __version__

    sizes = _INTERPRETED if not on_gpu else TOY if toy else FULL
    for name in NAMES[:2] if not on_gpu else NAMES:
        if on_gpu:
            run(llm, name, "warm", TOY)
        seconds, made = [], 0
        for repetition in range(repetitions):
            done = run(llm, name, repetition, sizes)
            seconds.append(done.seconds)
            made = done.out_tokens
        median = statistics.median(seconds)
        yield {
            "engine": f"cotrt {__version__}", "workload": name, "runs_s": seconds,
            "median_s": median, "out_tok_s": made / median,
        }  # fmt: skip


def host_time(llm: Any, *, toy: bool, on_gpu: bool) -> Iterator[dict[str, Any]]:
    """Milliseconds a decode step in all, and of these the engine's thread at work on the host.

    What is left of a step is waiting for the device.
    """
    engine = llm._runtime.engine
    length = 8 if not on_gpu else 64 if toy else 512
    for count in (2,) if toy else (1, 64, 256):
        with llm.branch(tokens("host", length, llm.vocab_size)) as root:
            branches = root.fork(count)
            _grow(branches, 2)
            waited, steps, plain = 0.0, llm.metrics["steps"], engine.model.fetch

            def fetch(*tensors: Any, plain: Any = plain) -> Any:
                copied = plain(*tensors)
                wait = copied.wait

                def timed() -> Any:
                    nonlocal waited
                    start = time.perf_counter()
                    try:
                        return wait()
                    finally:
                        waited += time.perf_counter() - start

                copied.wait = timed
                return copied

            engine.model.fetch = fetch
            start = time.perf_counter()
            try:
                _grow(branches, 2 if not on_gpu else 16 if toy else 128)
            finally:
                engine.model.fetch = plain
            total = time.perf_counter() - start
            done = max(1, llm.metrics["steps"] - steps)
        yield {
            "branches": count, "step_ms": total / done * 1e3,
            "waited_ms": waited / done * 1e3, "host_ms": (total - waited) / done * 1e3,
        }  # fmt: skip


def _grow(branches: Any, count: int) -> None:
    branches.generate(max_tokens=count, temperature=0.8, ignore_eos=True).result()


def peers(folder: str, *, toy: bool, repetitions: int, seconds: float) -> Iterator[dict[str, Any]]:
    """A record for each workload of each peer that is installed and ends in time."""
    for peer in PEERS:
        if importlib.util.find_spec(peer) is None:
            yield {"engine": peer, "skipped": "not installed"}
            continue
        command = [sys.executable, "-m", "cotrt.bench.gpu_peers", peer, folder, str(repetitions)]
        start = time.monotonic()
        process = subprocess.Popen(
            command + (["toy"] if toy else []),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        late = False
        try:
            out, error = process.communicate(timeout=max(1.0, seconds))
        except subprocess.TimeoutExpired:
            process.kill()
            out, error = process.communicate()
            late = True
        seconds -= time.monotonic() - start
        found = [json.loads(line) for line in out.splitlines() if line.startswith('{"engine"')]
        for record in found:
            yield {**record, "median_s": statistics.median(record["runs_s"])}
        if late:
            yield {"engine": peer, "skipped": "its time was up"}
        elif process.returncode:
            last = error.strip().splitlines()[-1:] or ["no message"]
            yield {"engine": peer, "skipped": f"it failed: {last[0][:200]}"}
