"""Random programs on the engine for a million steps, or an hour, all laws checked after each.

    python scripts/million_steps.py --steps 1000000
    python scripts/million_steps.py --minutes 60 --processes 2

A step is a verb of a program (fork, extend, generate, cancel, ...) or a step of the engine between
them. Programs are drawn by number, so `--only N` runs a single one again. A program that fails is
shrunk and printed with the law that it breaks.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path[:0] = [
    str(Path(__file__).resolve().parent.parent),
    str(Path(__file__).resolve().parent.parent / "tests" / "engine"),
]

NUM_VERBS = 60


def run_one(number: int) -> tuple[int, int, int, str | None]:
    """The number of a program, its verbs, the engine's steps, and why it failed."""
    import logging

    from engine_rig import LoggedModel
    from program_runner import draw_program, failure_of, law_of, run_program, shrink

    from cotrt.kernels.cpu import native

    if native.missing_reason() is None:
        LoggedModel.backend_name = "cpu"  # its sampler takes a third of the reference's time
    logging.getLogger("cotrt").setLevel(logging.CRITICAL)
    program = draw_program(number, NUM_VERBS)
    try:
        return number, len(program.verbs), run_program(program), None
    except Exception:
        smallest = shrink(program)
        failure = failure_of(smallest) or "it failed once, and not again"
    return number, 0, 0, f"{law_of(failure)}\n{smallest}\n{failure}"


def numbers(first: int, options: Any, done: dict[str, int], began: float) -> Iterator[int]:
    while done["verbs"] + done["steps"] < options.steps and (
        not options.minutes or time.monotonic() - began < 60 * options.minutes
    ):
        yield first
        first += 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--minutes", type=float, default=0, help="stop after these, if sooner")
    parser.add_argument("--first", type=int, default=0, help="number of the first program")
    parser.add_argument("--only", type=int, help="run this program alone")
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()

    def say(text: str) -> None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    if options.only is not None:
        failure = run_one(options.only)[3]
        say(failure or f"program {options.only} is fine")
        return 1 if failure else 0
    done, began, failed, reported = {"verbs": 0, "steps": 0}, time.monotonic(), 0, 0.0
    number = options.first
    context = multiprocessing.get_context("spawn")
    with context.Pool(options.processes) as pool:
        source = numbers(options.first, options, done, began)
        batches = iter(lambda: [n for n, _ in zip(source, range(16 * options.processes))], [])
        for batch in batches:
            for number, verbs, steps, failure in pool.imap_unordered(run_one, batch):
                done["verbs"] += verbs
                done["steps"] += steps
                if failure is not None:
                    failed += 1
                    say(f"program {number} failed: {failure}")
            elapsed = time.monotonic() - began
            if elapsed - reported > 30:
                reported = elapsed
                total = done["verbs"] + done["steps"]
                say(
                    f"{elapsed:.0f} s, programs to {number}: {total} steps, {total / elapsed:.0f}/s"
                )
    elapsed, total = time.monotonic() - began, done["verbs"] + done["steps"]
    say(
        f"programs {options.first} to {number}: {done['verbs']} verbs and {done['steps']} steps of "
        f"the engine in {elapsed:.0f} s, {total / elapsed:.0f} a second; {failed} programs failed"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
