"""`python -m cotrt.bench tiers`: chats in a pool of half their KV, with a disk and without.

Each chat is gone back to turn after turn. Without a tier the KV of those that had to make room is
computed again; with one it is read from disk. Runs of the two alternate, so that a machine whose
speed drifts says the same of both; texts are compared, and the figure is their ratio.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cotrt import LLM

_BLOCK_SIZE = 16


def main(argv: Sequence[str]) -> int:
    """Measure and print.

    Returns:
        The exit code: 0, or 1 where texts differed in deterministic mode.
    """
    parser = argparse.ArgumentParser(
        prog="python -m cotrt.bench tiers", description="A disk tier against computing again."
    )
    parser.add_argument("--model", default="smollm2-135m", help="hub id or folder")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--chats", type=int, default=16, help="branches that are gone back to")
    parser.add_argument("--context", type=int, default=512, help="tokens that a chat begins with")
    parser.add_argument("--turns", type=int, default=3, help="times that each is gone back to")
    parser.add_argument("--reply", type=int, default=24, help="tokens that a turn samples")
    parser.add_argument("--at-once", type=int, default=4, help="chats that speak at a time")
    parser.add_argument("--pressure", type=float, default=2.0, help="KV of all, in pools")
    parser.add_argument("--reps", type=int, default=3, help="runs of each kind")
    parser.add_argument("--disk-dir", help="folder of the disk tier (default: a temporary one)")
    parser.add_argument("--deterministic", action="store_true", help="texts must be equal")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args(argv)
    runs: dict[str, list[dict[str, Any]]] = {"recompute": [], "disk": []}
    for rep in range(options.reps):
        for kind in runs if rep % 2 == 0 else reversed(runs):
            runs[kind].append(measure(options, kind))
    texts = [run.pop("tokens") for kind in runs.values() for run in kind]
    equal = all(text == texts[0] for text in texts)
    pairs = zip(runs["disk"], runs["recompute"], strict=True)
    ratios = [disk["tokens_per_s"] / bare["tokens_per_s"] for disk, bare in pairs]
    report = {
        "options": vars(options),
        "runs": runs,
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "texts_equal": equal,
    }
    print(table(report))
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n")
    return 1 if options.deterministic and not equal else 0


def measure(options: argparse.Namespace, kind: str) -> dict[str, Any]:
    """One run: every chat's turns, in a pool of a part of what they need.

    Args:
        kind: "disk" or "recompute".
    """
    final = options.context + options.turns * (options.reply + 8)
    needed = options.chats * -(-final // _BLOCK_SIZE)
    with tempfile.TemporaryDirectory(dir=options.disk_dir) as folder:
        tier: dict[str, Any] = {}
        if kind == "disk":
            tier = {"disk_space": 16.0, "disk_dir": folder}
        common: dict[str, Any] = {
            "dtype": options.dtype,
            "block_size": _BLOCK_SIZE,
            "deterministic": options.deterministic,
        }
        token_bytes = _token_bytes(options.model, common)
        pool = int(needed / options.pressure) * _BLOCK_SIZE * token_bytes
        with LLM(options.model, kv_cache_memory_bytes=pool, **common, **tier) as llm:
            return _chats(llm, options)


def _token_bytes(model: str, common: dict[str, Any]) -> int:
    with LLM(model, kv_cache_memory_bytes=1 << 26, **common) as llm:
        return llm._runtime.engine.model.kv_bytes_per_token


def _chats(llm: LLM, options: argparse.Namespace) -> dict[str, Any]:
    pick = random.Random(0)

    def words(count: int) -> list[int]:
        return [pick.randrange(3, llm.vocab_size) for _ in range(count)]

    chats = [llm.branch(words(options.context)) for _ in range(options.chats)]
    # The first turn computes everybody once, in both kinds of run; it is not measured.
    began, sampled = 0.0, 0
    for turn in range(options.turns + 1):
        if turn == 1:
            began = time.perf_counter()
            before = llm.metrics
        for start in range(0, len(chats), options.at_once):
            some = chats[start : start + options.at_once]
            for chat in some:
                chat.extend(words(7))
            works = [
                chat.generate(max_tokens=options.reply, ignore_eos=True, temperature=0.0)
                for chat in some
            ]
            for work in works:
                work.result()
            sampled += options.reply * len(some) if turn else 0
    seconds = time.perf_counter() - began
    after = llm.metrics
    return {
        "tokens": [chat.token_ids for chat in chats],
        "tokens_per_s": sampled / seconds,
        "seconds": seconds,
        "pool_blocks": llm.memory().total,
        "disk_blocks": after["disk_blocks"],
        **{name: after[name] - before[name] for name in _COUNTERS},
    }


_COUNTERS = ("recomputed_tokens", "loaded_tokens", "stored_blocks", "failed_loads", "preemptions")


def table(report: dict[str, Any]) -> str:
    """The figures as text."""
    options = report["options"]
    lines = [
        (
            f"{options['chats']} chats of {options['context']} tokens, {options['turns']} turns of "
            f"{options['reply']}, {options['pressure']:g} times the pool, model {options['model']}"
        ),
        f"{'':<12}{'tokens/s':>10}{'recomputed':>12}{'loaded':>10}{'seconds':>10}",
    ]
    for kind, runs in report["runs"].items():
        for run in runs:
            lines.append(
                f"{kind:<12}{run['tokens_per_s']:>10.1f}{run['recomputed_tokens']:>12}"
                f"{run['loaded_tokens']:>10}{run['seconds']:>10.2f}"
            )
    lines.append(
        f"disk / recompute: {report['ratio']:.2f} (median of {len(report['ratios'])}); texts "
        + ("equal" if report["texts_equal"] else "differ (rounding; --deterministic compares)")
    )
    return "\n".join(lines)
