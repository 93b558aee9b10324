"""`python -m cotrt.bench step`: where a decode step's time goes, beside the memory limit.

The limit is the time that reading every weight and every KV token once takes, at the bandwidth
that is measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cotrt.bench.workloads import tokens

if TYPE_CHECKING:
    from cotrt import LLM

_BUFFER = 256 << 20


def main(argv: Sequence[str]) -> int:
    """Print the breakdown for one branch and for many over one prefix."""
    parser = argparse.ArgumentParser(
        prog="python -m cotrt.bench step", description="A decode step beside the memory limit."
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", default=None)
    parser.add_argument("--prefix", type=int, default=1024, help="tokens that are shared")
    parser.add_argument("--branches", default="1,32", help="such as 1,8,32")
    parser.add_argument("--steps", type=int, default=64, help="steps a measurement")
    parser.add_argument("--reps", type=int, default=5, help="measurements; the median counts")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args(argv)
    from cotrt import LLM

    with LLM(
        options.model,
        dtype=options.dtype,
        quantization=options.quantization,
        num_threads=options.threads,
        device="cpu",
        kv_cache_memory_bytes=1 << 30,
    ) as llm:
        counts = [int(text) for text in options.branches.split(",")]
        rows = _measure(llm, counts, options)
    print(_table(rows))
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")
    return 0


def _measure(llm: LLM, counts: Sequence[int], options: argparse.Namespace) -> list[dict[str, Any]]:
    """All counts in turn, repetition by repetition, the bandwidth between them."""
    found: dict[int, list[dict[str, Any]]] = {count: [] for count in counts}
    with llm.branch(tokens("step/prefix", options.prefix, llm.vocab_size)) as root:
        root.generate(max_tokens=1, ignore_eos=True).result()
        root.truncate(options.prefix)
        for repetition in range(options.reps + 1):
            for count in counts:
                figures = _run(llm, root.fork(count), options.steps)
                figures["bandwidth"] = read_bandwidth(1)
                if repetition:  # the first warms up
                    found[count].append(figures)
    rows = []
    for count, runs in found.items():
        medians = {
            key: statistics.median(run[key] for run in runs)
            for key in runs[0]
            if isinstance(runs[0][key], (int, float))
        }
        limit = (medians["weight_bytes"] + medians["kv_bytes"]) / medians["bandwidth"] * 1e3
        rows.append({"branches": count, **medians, "limit_ms": limit})
    return rows


def _run(llm: LLM, branches: Any, steps: int) -> dict[str, Any]:
    """Milliseconds a step: all of it, the model's phases, the sampler, and the host's work."""
    engine = llm._runtime.engine
    model: Any = engine.model
    runner: Any = engine._runner
    spent = {"runner": 0.0, "model": 0.0}
    restore = runner.run, model.run

    def timed(name: str, call: Any) -> Any:
        def inner(*arguments: Any) -> Any:
            start = time.perf_counter()
            result = call(*arguments)
            spent[name] += time.perf_counter() - start
            return result

        return inner

    with branches:
        # The first steps fill tails and start the batch; they are not measured.
        branches.generate(max_tokens=4, temperature=0.8, ignore_eos=True).result()
        before = llm.metrics["steps"]
        if hasattr(model, "timings"):
            model.timings(reset=True)
        runner.run, model.run = timed("runner", runner.run), timed("model", model.run)
        start = time.perf_counter()
        try:
            branches.generate(max_tokens=steps, temperature=0.8, ignore_eos=True).result()
        finally:
            runner.run = restore[0]
            model.run = restore[1]
        total = time.perf_counter() - start
        count = llm.metrics["steps"] - before
        stored = llm.memory().tokens_stored
    per_step = 1e3 / count
    figures = {
        "step_ms": total * per_step,
        "model_ms": spent["model"] * per_step,
        "sampler_ms": (spent["runner"] - spent["model"]) * per_step,
        "host_ms": (total - spent["runner"]) * per_step,
        "weight_bytes": float(getattr(model, "weight_bytes", 0)),
        "kv_bytes": float(stored * model.kv_bytes_per_token),
    }
    if hasattr(model, "timings"):
        phases = {name: seconds * per_step for name, seconds in model.timings().items()}
        figures["attention_ms"] = phases.get("attention", 0.0) + phases.get("merge", 0.0)
        figures["head_ms"] = phases.get("head", 0.0)
        figures["linears_ms"] = sum(phases.get(n, 0.0) for n in ("qkv", "o", "gate_up", "down"))
        figures["rest_ms"] = (
            figures["model_ms"]
            - figures["attention_ms"]
            - figures["head_ms"]
            - figures["linears_ms"]
        )
    return figures


def read_bandwidth(repetitions: int = 5) -> float:
    """Bytes a second that summing a buffer larger than the caches reads; the best of some runs."""
    import torch

    buffer = torch.ones(_BUFFER // 4)
    best = float("inf")
    for _ in range(repetitions + 2):
        start = time.perf_counter()
        buffer.sum()
        best = min(best, time.perf_counter() - start)
    return _BUFFER / best


def _table(rows: Sequence[dict[str, Any]]) -> str:
    names = [
        "step_ms",
        "limit_ms",
        "linears_ms",
        "attention_ms",
        "head_ms",
        "rest_ms",
        "sampler_ms",
        "host_ms",
    ]
    lines = ["| branches | " + " | ".join(names) + " | step / limit | GB/s |"]
    lines.append("|---" * (len(names) + 3) + "|")
    for row in rows:
        cells = [f"{row.get(name, float('nan')):.2f}" for name in names]
        ratio = row["step_ms"] / row["limit_ms"]
        gigabytes = row["bandwidth"] / 1e9
        lines.append(
            f"| {row['branches']} | " + " | ".join(cells) + f" | {ratio:.2f} | {gigabytes:.1f} |"
        )
    return "\n".join(lines)
