"""`python -m cotrt.bench deterministic`: what deterministic=True costs, beside the default.

Two engines over the same model, one of each kind, take the same workload in turn; a repetition's
ratio is of two runs that follow each other, so that a machine that slows down slows both.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cotrt.bench.workloads import FULL, TOY, run

if TYPE_CHECKING:
    from cotrt import LLM


def main(argv: Sequence[str]) -> int:
    """Run the workloads; print a table, write JSON where asked."""
    parser = argparse.ArgumentParser(
        prog="python -m cotrt.bench deterministic",
        description="Workloads with and without deterministic=True, in turn.",
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", default=None)
    parser.add_argument("--only", default="W1,W2,W3", help="workloads, such as W2,W5")
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--toy", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--json", help="write the records to this file")
    options = parser.parse_args(argv)
    from cotrt import LLM

    def opened(deterministic: bool) -> LLM:
        return LLM(
            options.model,
            dtype=options.dtype,
            quantization=options.quantization,
            device="cpu",
            kv_cache_memory_bytes=(64 << 20) if options.toy else (1 << 30),
            max_num_seqs=64,
            seed=1,
            deterministic=deterministic,
        )

    sizes = TOY if options.toy else FULL
    records = []
    with opened(False) as plain, opened(True) as exact:
        for name in options.only.split(","):
            seconds: dict[bool, list[float]] = {False: [], True: []}
            tokens = 0
            for llm in (plain, exact):
                run(llm, name, "warm", TOY)
            for repetition in range(options.reps):
                # Who goes first changes, so that neither always finds what the other left warm.
                order = [False, True] if repetition % 2 == 0 else [True, False]
                for deterministic in order:
                    done = run(exact if deterministic else plain, name, repetition, sizes)
                    seconds[deterministic].append(done.seconds)
                    tokens = done.out_tokens
            records.append(_record(name, tokens, seconds))
    report = {
        "model": options.model,
        "dtype": options.dtype,
        "quantization": options.quantization,
        "repetitions": options.reps,
        "records": records,
    }
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n")
    print(table(records))
    return 0


def _record(name: str, tokens: int, seconds: dict[bool, list[float]]) -> dict[str, Any]:
    ratios = [a / b for a, b in zip(seconds[False], seconds[True], strict=True)]
    return {
        "workload": name,
        "out_tokens": tokens,
        "default_s": [round(s, 3) for s in seconds[False]],
        "deterministic_s": [round(s, 3) for s in seconds[True]],
        "throughput_ratio": round(statistics.median(ratios), 3),
        "ratios": [round(r, 3) for r in ratios],
    }


def table(records: Sequence[dict[str, Any]]) -> str:
    """Markdown: median seconds of both kinds, and the throughput that is left."""
    lines = [
        "| workload | default | deterministic | throughput kept (smallest to largest) |",
        "|---|---|---|---|",
    ]
    for record in records:
        default, exact = (
            statistics.median(record[key]) for key in ("default_s", "deterministic_s")
        )
        low, high = min(record["ratios"]), max(record["ratios"])
        lines.append(
            f"| {record['workload']} | {default:.2f} s | {exact:.2f} s | "
            f"{record['throughput_ratio']:.2f} ({low:.2f} to {high:.2f}) |"
        )
    return "\n".join(lines)
