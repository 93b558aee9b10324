"""`python -m cotrt.bench busy`: what a second Python thread in a busy loop costs the engine."""

from __future__ import annotations

import argparse
import statistics
import threading
from collections.abc import Sequence

from cotrt.bench.workloads import FULL, TOY, run


def main(argv: Sequence[str]) -> int:
    """Run a workload alone and beside the busy thread, in turn; print medians and their ratio."""
    parser = argparse.ArgumentParser(
        prog="python -m cotrt.bench busy", description="A workload beside a busy Python thread."
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--workload", default="W2")
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--toy", action="store_true")
    options = parser.parse_args(argv)
    from cotrt import LLM

    seconds: dict[bool, list[float]] = {False: [], True: []}
    with LLM(
        options.model, dtype=options.dtype, device="cpu", kv_cache_memory_bytes=1 << 30
    ) as llm:
        run(llm, options.workload, "warm", TOY)
        for repetition in range(options.reps):
            for busy in (False, True):
                stop = threading.Event()
                thread = threading.Thread(target=_spin, args=(stop,), daemon=True)
                if busy:
                    thread.start()
                done = run(
                    llm, options.workload, f"{repetition}/{busy}", TOY if options.toy else FULL
                )
                stop.set()
                if busy:
                    thread.join()
                seconds[busy].append(done.seconds)
    alone, beside = statistics.median(seconds[False]), statistics.median(seconds[True])
    print(
        f"{options.workload}: {alone:.2f} s alone, {beside:.2f} s beside a busy thread, "
        f"{beside / alone:.2f}x (medians of {options.reps})"
    )
    return 0


def _spin(stop: threading.Event) -> None:
    count = 0
    while not stop.is_set():
        count += 1
