"""`python -m cotrt.bench gpu`: kernels, decode steps and workloads on one GPU, in one command.

Sections run in turn, each within a share of the time; what does not fit is reported as skipped,
with the reason. ``--toy`` runs all of it at toy size, without a GPU in Triton's interpreter, where
times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
KERNEL_TESTS = ROOT / "tests/kernels/triton_kernels/interpreted"

Record = dict[str, Any]
# Section -> the share of the whole time that it may take.
SECTIONS = {
    "tests": 0.22, "bandwidth": 0.02, "attention": 0.2, "decode": 0.2, "workloads": 0.13,
    "host": 0.03, "peers": 0.2,
}  # fmt: skip
# What each section's table shows.
COLUMNS = {
    "tests": ("passed", "failed", "complete"),
    "bandwidth": ("tb_per_s",),
    "attention": (
        "shape", "kv_heads", "tree_us", "tree_mb", "tree_of_roofline", "per_query_us",
        "per_query_of_roofline", "over_per_query", "sdpa_us", "flash_attn_us", "flashinfer_us",
        "max_error",
    ),
    "decode": (
        "model", "batch", "context", "step_ms", "limit_ms", "of_limit", "launch_ms", "graph",
    ),
    "workloads": ("engine", "workload", "median_s", "out_tok_s"),
    "host": ("branches", "step_ms", "waited_ms", "host_ms"),
    "peers": ("engine", "workload", "median_s", "skipped"),
}  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Run the benchmark.

    Returns:
        The exit code: 1 if a section failed, 2 without a GPU.
    """
    options = _parser().parse_args(argv)
    names = [name.strip() for name in options.only.split(",")]
    if unknown := set(names) - set(SECTIONS):
        _parser().error(f"--only: {', '.join(sorted(unknown))} is not one of {tuple(SECTIONS)}")
    import torch

    on_gpu = torch.cuda.is_available()
    if not on_gpu and not options.toy:
        print(
            "python -m cotrt.bench gpu: torch sees no CUDA device, so there is nothing to measure; "
            "--toy shows in Triton's interpreter that the script runs",
            file=sys.stderr,
        )
        return 2
    if not on_gpu:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is first imported
    report = _run(options, names, on_gpu)
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n")
    print(table(report))
    return 1 if any(s["status"] == "failed" for s in report["sections"].values()) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m cotrt.bench gpu", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--model", default="smollm2-135m", help="of the workloads; a folder or id")
    parser.add_argument("--only", default=",".join(SECTIONS), help="such as attention,decode")
    parser.add_argument("--seconds", type=float, default=450.0, help="for all sections together")
    parser.add_argument("--reps", type=int, default=2, help="repetitions of a workload")
    parser.add_argument("--toy", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--json", help="write all records to this file")
    return parser


def _run(options: argparse.Namespace, names: Sequence[str], on_gpu: bool) -> Record:
    import torch

    from cotrt import __version__
    from cotrt.bench import gpu_attention, gpu_decode, gpu_workloads
    from cotrt.bench.gpu_timing import Timer, give_back, memory_bandwidth

    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    timer, toy = Timer(device), bool(options.toy)
    found: dict[str, Any] = {}

    def bandwidth() -> float:
        if "bandwidth" not in found:
            found["bandwidth"] = memory_bandwidth(timer)
        return float(found["bandwidth"])

    def llm() -> Any:
        if "llm" not in found:
            give_back(timer)
            found["llm"] = gpu_workloads.open_llm(options.model, toy=toy, on_gpu=on_gpu)
        return found["llm"]

    def peers(seconds: float) -> Iterator[Record]:
        from cotrt.models import hub

        if "llm" in found:  # its pool takes much of the GPU
            found.pop("llm").close()
        give_back(timer)
        folder = str(hub.find(options.model).folder)
        return gpu_workloads.peers(folder, toy=toy, repetitions=options.reps, seconds=seconds)

    sections: dict[str, Callable[[float], Iterable[Record]]] = {
        "tests": lambda seconds: _kernel_tests(seconds, toy),
        "bandwidth": lambda _: [{"tb_per_s": bandwidth() / 1e12}],
        "attention": lambda _: gpu_attention.run(timer, bandwidth(), toy=toy),
        "decode": lambda _: gpu_decode.run(timer, bandwidth(), toy=toy),
        "workloads": lambda _: gpu_workloads.workloads(
            llm(), toy=toy, on_gpu=on_gpu, repetitions=options.reps
        ),
        "host": lambda _: gpu_workloads.host_time(llm(), toy=toy, on_gpu=on_gpu),
        "peers": peers,
    }
    report: Record = {
        "device": torch.cuda.get_device_name(0) if on_gpu else "none: Triton's interpreter",
        "torch": torch.__version__,
        "cotrt": __version__,
        "toy": toy,
        "sections": {},
    }
    end = time.monotonic() + options.seconds
    for name in SECTIONS:
        if name in names:
            share = options.seconds * SECTIONS[name]
            report["sections"][name] = _section(sections[name], share, end)
            print(f"{name}: {report['sections'][name]['status']}", file=sys.stderr, flush=True)
    if "llm" in found:
        found.pop("llm").close()
    return report


def _section(call: Callable[[float], Iterable[Record]], share: float, end: float) -> Record:
    """Records of a section until its time, or all time, is up."""
    start = time.monotonic()
    limit = min(start + share, end)
    section: Record = {"status": "ok", "records": []}
    if limit - start < min(1.0, share / 2):
        return {"status": "skipped", "reason": "the time was up before it began", "records": []}
    try:
        for record in call(limit - start):
            section["records"].append(record)
            if time.monotonic() > limit:
                section["status"] = "cut"
                section["reason"] = f"its {share:.0f} s were up; what was left is skipped"
                break
    except Exception as error:  # the other sections go on
        section["status"] = "failed"
        section["reason"] = f"{type(error).__name__}: {error}"
    section["seconds"] = round(time.monotonic() - start, 1)
    return section


def _kernel_tests(seconds: float, toy: bool) -> Iterator[Record]:
    """The kernels against the reference on this device, by the tests of the checkout."""
    if not KERNEL_TESTS.is_dir():
        raise FileNotFoundError(f"{KERNEL_TESTS} is not there: run from a checkout for the tests")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(KERNEL_TESTS)]
    command += ["-k", "silu"] if toy else ["--maxfail=10"]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    complete = True
    try:
        out, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        out, _ = process.communicate()
        complete = False

    def count(word: str, dot: str) -> int:
        said = re.search(rf"(\d+) {word}", out)
        lines = re.findall(r"^[.FEsx]+(?= |$)", out, re.MULTILINE)
        return int(said[1]) if said else sum(line.count(dot) for line in lines)

    failed = count("failed", "F") + count("error", "E")
    yield {"passed": count("passed", "."), "failed": failed, "complete": complete}
    if failed or (complete and process.returncode):
        raise AssertionError("kernel tests failed:\n" + out[-3000:])


def table(report: Record) -> str:
    """Markdown: a table a section."""
    lines = [f"{report['device']}; torch {report['torch']}, cotrt {report['cotrt']}"]
    for name, section in report["sections"].items():
        reason = f" ({section['reason']})" if "reason" in section else ""
        lines += ["", f"## {name}: {section['status']}{reason}"]
        if not section["records"]:
            continue
        columns = COLUMNS[name]
        lines += ["", "| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
        for record in section["records"]:
            lines.append("| " + " | ".join(_cell(record.get(c)) for c in columns) + " |")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
