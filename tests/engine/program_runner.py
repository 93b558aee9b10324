"""Random programs by number: drawn, run with all laws checked, shrunk where one breaks."""

from __future__ import annotations

import random
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from draws import number, verbs_of
from engine_program import EngineProgram

VERBS = verbs_of(EngineProgram)


@dataclass
class Program:
    """The arguments of `make`, and verbs; any of the verbs may be left out.

    Attributes:
        verbs: of each its name, its arguments, and what it meets by chance comes of.
    """

    settings: dict[str, Any]
    verbs: list[tuple[str, dict[str, Any], int]]

    def __str__(self) -> str:
        lines = [f"make(**{self.settings!r})"]
        lines += [f"{name}(**{arguments!r})  # {seed}" for name, arguments, seed in self.verbs]
        return "\n".join(lines)


@dataclass
class Outcome:
    """What a program came to.

    Attributes:
        num_verbs: its verbs; num_steps: the engine's steps, its twins' left out.
        happened: how often what has happened.
    """

    num_verbs: int = 0
    num_steps: int = 0
    happened: Counter[str] = field(default_factory=Counter)


def draw_program(seed: int, num_verbs: int, **settings: Any) -> Program:
    """The program of a seed. Each has its own favourites among the verbs.

    Args:
        settings: in place of those that are drawn.
    """
    pick = random.Random(seed)
    drawn = EngineProgram.draw_settings(pick)
    weights = [each.weight * pick.choice([0, 0.3, 1, 1, 3]) for each in VERBS.values()]
    names = pick.choices(list(VERBS), weights, k=num_verbs)
    verbs = [(name, VERBS[name].arguments(pick), number(pick)) for name in names]
    return Program({**drawn, **settings}, verbs)


def run_program(program: Program) -> Outcome:
    """Run it, with all laws checked on the way.

    Raises:
        Exception: whatever law was broken.
    """
    machine = EngineProgram()
    try:
        machine.make(**program.settings)
        for name, arguments, seed in program.verbs:
            machine.begin_verb(seed)
            getattr(machine, name)(**arguments)
        machine.begin_verb(0)
        machine.teardown()
        happened = machine.happened()
        happened.update(f"drawn: {name}" for name, _, _ in program.verbs)
        return Outcome(len(program.verbs), machine.rig.num_steps, happened)
    finally:
        machine.dispose()


def failure_of(program: Program) -> str | None:
    """The traceback of what it breaks, or None."""
    try:
        run_program(program)
    except Exception:
        return traceback.format_exc()
    return None


def shrink(program: Program, seconds: float = 120) -> Program:
    """A program that still fails and has as few verbs as could be found in `seconds`."""
    deadline, chunk = time.monotonic() + seconds, max(1, len(program.verbs) // 2)
    while chunk:
        start, smaller = 0, False
        while start < len(program.verbs) and time.monotonic() < deadline:
            left = Program(program.settings, program.verbs[:start] + program.verbs[start + chunk :])
            if failure_of(left) is not None:
                program, smaller = left, True
            else:
                start += chunk
        if not smaller or time.monotonic() > deadline:
            chunk //= 2
    return program


def law_of(failure: str) -> str:
    """The last line of a failure, which names the law."""
    return failure.strip().splitlines()[-1]
