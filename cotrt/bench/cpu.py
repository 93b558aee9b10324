"""`python -m cotrt.bench cpu`: the workloads on cotrt, beside peers where they are installed.

Peers run by their own scripts (through `peer.py`, which adds P1 and P2 to them), each in its own
environment, at the same time as cotrt here: all take one lock file for every repetition, so that
the engines run in turn and never together.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cotrt.bench.workloads import FULL, TOY, Run, run

if TYPE_CHECKING:
    from cotrt import LLM

WORKLOADS = ("W1", "W2", "W3", "W4", "W5", "W6", "P1", "P2")


def main(argv: Sequence[str]) -> int:
    """Run the benchmark.

    Returns:
        The exit code: 1 if a peer's script failed.
    """
    from cotrt.models.conditions import cpu_name

    options = _parser().parse_args(argv)
    names = [name.strip() for name in options.only.split(",")]
    unknown = set(names) - set(WORKLOADS)
    if unknown:
        _parser().error(f"--only: {', '.join(sorted(unknown))} is not one of {WORKLOADS}")
    with tempfile.TemporaryDirectory() as scratch:
        lock = Path(scratch, "lock")
        record = Path(scratch, "peers.json")
        peers = [_start_peer(text, options, lock, record) for text in options.peer]
        ours = _measure(options, names, lock)
        failed = [name for name, process in peers if process.wait() != 0]
        theirs = json.loads(record.read_text()) if record.exists() else []
    report = {
        "machine": {
            "cpu": cpu_name(),
            "threads": options.threads,
            "python": platform.python_version(),
        },
        "model": options.model,
        "repetitions": options.reps,
        "records": ours + theirs,
    }
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n")
    print(table(report["records"], names))
    for name in failed:
        print(f"the peer {name} failed", file=sys.stderr)
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m cotrt.bench cpu",
        description="W1 to W6, P1 and P2 on cotrt and, in turn with it, on peers.",
        epilog="example: python -m cotrt.bench cpu --peer vllm=/envs/vllm/bin/python "
        "--peer openvino=/envs/ov/bin/python --scripts ../shared/bench --reps 5",
    )
    parser.add_argument("--model", default="smollm2-135m", help="folder, id or the starter model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", default=None)
    parser.add_argument("--reps", type=int, default=3, help="timed repetitions after a warm-up")
    parser.add_argument("--only", default=",".join(WORKLOADS), help="such as W2,W3")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--toy", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--json", help="write all records to this file")
    parser.add_argument("--scripts", type=Path, help="folder of the peers' bench_NAME.py")
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=PYTHON",
        help="run bench_NAME.py with that interpreter; its own variables come from the environment",
    )
    return parser


def _start_peer(
    text: str, options: argparse.Namespace, lock: Path, record: Path
) -> tuple[str, subprocess.Popen[bytes]]:
    name, _, python = text.partition("=")
    if not python or options.scripts is None:
        raise SystemExit(f"--peer {text}: give NAME=PYTHON, and --scripts")
    model = Path(options.model).expanduser().resolve()
    sizes = TOY if options.toy else FULL
    environment = {
        **os.environ,
        "BENCH_LOCK": str(lock),
        "BENCH_OUT": str(record),
        "BENCH_REPS": str(options.reps),
        "BENCH_ONLY": options.only,
        "BENCH_THREADS": str(options.threads),
        "BENCH_MODELS": str(model.parent),
        "BENCH_MODEL": model.name,
        "BENCH_PROMPTS": json.dumps({"P1": sizes.p1, "P2": sizes.p2}),
    }
    script = options.scripts / f"bench_{name}.py"
    adapter = Path(__file__).with_name("peer.py")
    command = [python, str(adapter), str(script)]
    return name, subprocess.Popen(command, env=environment, stdout=sys.stderr)


def _measure(options: argparse.Namespace, names: Sequence[str], lock: Path) -> list[dict[str, Any]]:
    from cotrt import LLM, __version__

    sizes = TOY if options.toy else FULL
    with _held(lock):
        llm = LLM(
            options.model,
            dtype=options.dtype,
            quantization=options.quantization,
            num_threads=options.threads,
            device="cpu",
            kv_cache_memory_bytes=(64 << 20) if options.toy else (4 << 30),
            max_num_seqs=64,
            seed=1,
        )
    records = []
    with llm:
        for name in names:
            with _held(lock):
                run(llm, name, "warm", TOY)
            runs = []
            for repetition in range(options.reps):
                with _held(lock):
                    runs.append(run(llm, name, repetition, sizes))
            records.append(_record(llm, f"cotrt {__version__}", options, name, runs))
    return records


def _record(
    llm: LLM, version: str, options: argparse.Namespace, name: str, runs: Sequence[Run]
) -> dict[str, Any]:
    seconds = [r.seconds for r in runs]
    median = statistics.median(seconds)
    ttft = [r.ttft for r in runs if r.ttft is not None]
    return {
        "engine": "cotrt" + (f"-{options.quantization}" if options.quantization else ""),
        "version": version,
        "dtype": options.dtype,
        "kernels": llm.kernels,
        "workload": name,
        "status": "ok",
        "runs_s": [round(s, 3) for s in seconds],
        "median_s": round(median, 3),
        "out_tokens": runs[0].out_tokens,
        "out_tok_s": round(runs[0].out_tokens / median, 1),
        "extra": {"ttft_last_s": round(statistics.median(ttft), 4)} if ttft else {},
    }


def table(records: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
    """Markdown: a row an engine; median seconds, smallest and largest, tokens a second."""
    engines = list(dict.fromkeys(r["engine"] for r in records))
    found = {(r["engine"], r["workload"]): r for r in records if r.get("status") == "ok"}
    lines = ["| engine | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for engine in engines:
        cells = []
        for name in names:
            record = found.get((engine, name))
            if record is None:
                cells.append("-")
                continue
            low, high = min(record["runs_s"]), max(record["runs_s"])
            cells.append(
                f"{record['median_s']:.2f} s ({low:.2f} to {high:.2f}), "
                f"{record['out_tok_s']:.0f} tok/s"
            )
        lines.append(f"| {engine} | " + " | ".join(cells) + " |")
    peers = [e for e in engines if not e.startswith("cotrt")]
    for engine in [e for e in engines if e.startswith("cotrt")]:
        cells = []
        for name in names:
            best = min(
                (found[p, name]["median_s"] for p in peers if (p, name) in found), default=None
            )
            own = found.get((engine, name))
            cells.append("-" if best is None or own is None else f"{best / own['median_s']:.2f}x")
        if peers:
            lines.append(f"| {engine} over the better peer | " + " | ".join(cells) + " |")
    return "\n".join(lines)


@contextlib.contextmanager
def _held(lock: Path) -> Iterator[None]:
    """Hold the lock file that peers' scripts take too."""
    import fcntl

    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)
