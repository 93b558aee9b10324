"""Random programs on the engine for a million steps, or an hour, all laws checked after each.

    python scripts/million_steps.py --steps 1000000
    python scripts/million_steps.py --minutes 60 --processes 2

A step is a verb of a program (fork, extend, generate, cancel, ...) or a step of the engine between
them. Programs are drawn by number, so `--only N` runs a single one again. A program that fails is
shrunk and printed with the law that it breaks.

Ctrl-C or SIGTERM ends it after the programs that are running, with the totals so far and the
options that a later call goes on with; its totals then are those of all calls together.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path[:0] = [
    str(Path(__file__).resolve().parent.parent),
    str(Path(__file__).resolve().parent.parent / "tests" / "engine"),
]

NUM_VERBS = 150
_for_good = contextlib.ExitStack()


def begin() -> None:
    """What each process does first."""
    import gc
    import logging

    from program_runner import VERBS
    from quick_sampling import quickly

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that began it says when to end
    assert VERBS
    _for_good.enter_context(quickly())
    logging.getLogger("cotrt").setLevel(logging.CRITICAL)
    gc.collect()
    gc.freeze()  # modules need not be looked at again by the collections that programs ask for


def run_one(number: int) -> tuple[int, Any, str | None]:
    """The number of a program, its outcome, and why it failed."""
    from program_runner import Outcome, draw_program, failure_of, law_of, run_program, shrink

    program = draw_program(number, NUM_VERBS)
    try:
        return number, run_program(program), None
    except Exception:
        smallest = shrink(program)
        failure = failure_of(smallest) or "it failed once, and not again"
    return number, Outcome(), f"{law_of(failure)}\n{smallest}\n{failure}"


class Run:
    """Programs one after another, and what they came to.

    Args:
        options: the command line.
    """

    def __init__(self, options: Any) -> None:
        self._options = options
        self._next = options.first
        self._began = time.monotonic()
        self._reported = 0.0
        self.verbs, self.steps, self.failed = options.verbs, options.engine_steps, 0
        self.seconds_before = options.seconds
        self.happened: Counter[str] = Counter()
        self.is_over = False

    @property
    def seconds(self) -> float:
        return self.seconds_before + time.monotonic() - self._began

    def numbers(self) -> Iterator[int]:
        """Numbers of programs, until there are steps enough or somebody ends it."""
        options = self._options
        while (
            not self.is_over
            and self.verbs + self.steps < options.steps
            and not (options.minutes and time.monotonic() - self._began > 60 * options.minutes)
        ):
            yield self._next
            self._next += 1

    def take(self, number: int, outcome: Any, failure: str | None) -> None:
        self.verbs += outcome.num_verbs
        self.steps += outcome.num_steps
        self.happened.update(outcome.happened)
        if failure is not None:
            self.failed += 1
            say(f"program {number} failed: {failure}")
        if time.monotonic() - self._reported > 30:
            self._reported = time.monotonic()
            say(str(self))

    def __str__(self) -> str:
        total = self.verbs + self.steps
        return (
            f"programs below {self._next}: {total} steps ({self.verbs} verbs and {self.steps} "
            f"steps of the engine) in {self.seconds:.0f} s, {total / self.seconds:.0f} a second; "
            f"{self.failed} programs failed"
        )

    def resume(self) -> str:
        return (
            f"--first {self._next} --verbs {self.verbs} --engine-steps {self.steps} "
            f"--seconds {self.seconds:.0f}"
        )


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--minutes", type=float, default=0, help="stop after these, if sooner")
    parser.add_argument("--first", type=int, default=0, help="number of the first program")
    parser.add_argument("--only", type=int, help="run this program alone")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--verbs", type=int, default=0, help="done by earlier calls")
    parser.add_argument("--engine-steps", type=int, default=0, help="done by earlier calls")
    parser.add_argument("--seconds", type=float, default=0, help="taken by earlier calls")
    options = parser.parse_args()
    if options.only is not None:
        begin()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        failure = run_one(options.only)[2]
        say(failure or f"program {options.only} is fine")
        return 1 if failure else 0
    run = Run(options)
    context = multiprocessing.get_context("spawn")
    with context.Pool(options.processes, initializer=begin) as pool:

        def end(number: int, frame: Any) -> None:
            run.is_over = True

        signal.signal(signal.SIGINT, end)
        signal.signal(signal.SIGTERM, end)
        source = run.numbers()
        batches = iter(lambda: [n for n, _ in zip(source, range(8 * options.processes))], [])
        for batch in batches:
            for number, outcome, failure in pool.imap_unordered(run_one, batch):
                run.take(number, outcome, failure)
        pool.close()
        pool.join()
    say(str(run))
    say("of these: " + ", ".join(f"{name} {n}" for name, n in sorted(run.happened.items())))
    say("go on with " + run.resume())
    return 1 if run.failed else 0


if __name__ == "__main__":
    sys.exit(main())
