"""Random programs without hypothesis, for millions of steps: drawn by seed, run, shrunk."""

from __future__ import annotations

import random
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tree_program import PARAMS, TreeProgram

Draw = Callable[[random.Random], Any]


def _number(pick: random.Random) -> int:
    return pick.randrange(1 << 20)


def _ids(pick: random.Random) -> list[int]:
    return [pick.randint(1, 3) for _ in range(pick.randint(1, 24))]


def _among(*values: Any) -> Draw:
    return lambda pick: pick.choice(values)


def _several(draw: Draw, least: int, most: int) -> Draw:
    return lambda pick: [draw(pick) for _ in range(pick.randint(least, most))]


def _options(pick: random.Random) -> list[list[int]]:
    return [list(o) for o in dict.fromkeys(tuple(_ids(pick)) for _ in range(pick.randint(1, 3)))]


_flag = _among(False, True)
_where = {"when": _number, "pick": _number}

MAKE: dict[str, Draw] = {
    "num_blocks": _among(2, 3, 4, 6, 8, 12, 20, 64),
    "block_size": _among(8, 16),
    "max_num_seqs": _among(1, 2, 4, 256),
    "budget": _among(1, 5, 16, 64, 2048),
    "scored": _among(1, 3, 1024),
    "match": _flag,
    "ids": _ids,
}

# Each verb of TreeProgram: how often, and how its arguments are drawn.
VERBS: dict[str, tuple[int, dict[str, Draw]]] = {
    "root": (4, {"when": _number, "ids": _ids}),
    "fork": (6, {**_where, "n": _among(1, 2, 3)}),
    "fork_at": (3, {**_where, "at": _number}),
    "extend": (5, {**_where, "ids": _ids}),
    "truncate": (4, {**_where, "at": _number, "same": _flag}),
    "generate": (9, {**_where, "params": _among(*PARAMS)}),
    "generate_many": (5, {"when": _number, "picks": _several(_number, 2, 4), "params": _number}),
    "submit": (
        3,
        {
            "when": _number,
            "prompts": _several(_ids, 1, 3),
            "params": _among(*PARAMS),
            "n": _among(1, 2, 3),
        },
    ),
    "score": (4, {**_where, "options": _several(_ids, 1, 4)}),
    "choose": (4, {**_where, "options": _options}),
    "cancel": (3, _where),
    "prune": (3, _where),
    "close": (3, {**_where, "collect": lambda pick: pick.random() < 0.3}),
    "reopen": (3, _where),
    "keep": (2, {**_where, "seconds": _among(0, 1000)}),
    "steps": (18, {"count": _among(1, 2, 3, 4, 5, 6)}),
    "step_fails": (1, {}),
    "memory_is_short": (
        2,
        {"room": _among(0, 1, 2, 5, 17), "copies": _flag, "count": _among(1, 2, 4, 8)},
    ),
    "logits_are_nan": (1, {"nan_of": _among(1, 3, 7), "count": _among(1, 2, 4)}),
    "tokenizer_raises": (1, {"count": _among(1, 2, 4)}),
}
_STORM_IN = 4000  # one verb in so many is a storm of forks


@dataclass
class Program:
    """The arguments of `make`, and verbs with theirs; any of the verbs may be left out."""

    make: dict[str, Any]
    verbs: list[tuple[str, dict[str, Any]]]

    def __str__(self) -> str:
        lines = [f"make(**{self.make!r})"]
        lines += [f"{name}(**{arguments!r})" for name, arguments in self.verbs]
        return "\n".join(lines)


def draw_program(seed: int, num_verbs: int) -> Program:
    """The program of a seed."""
    pick = random.Random(seed)
    names, weights = list(VERBS), [weight for weight, _ in VERBS.values()]
    verbs = []
    for name in pick.choices(names, weights, k=num_verbs):
        if pick.randrange(_STORM_IN) == 0:
            verbs.append(("storm", {"pick": _number(pick)}))
        verbs.append((name, {key: draw(pick) for key, draw in VERBS[name][1].items()}))
    return Program({key: draw(pick) for key, draw in MAKE.items()}, verbs)


def run_program(program: Program) -> int:
    """Run it, with all laws checked on the way.

    Returns:
        The engine's steps, beside the program's own.

    Raises:
        Exception: whatever law was broken.
    """
    machine = TreeProgram()
    machine.make(**program.make)
    for name, arguments in program.verbs:
        getattr(machine, name)(**arguments)
    machine.teardown()
    return machine.rig.num_steps


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
            left = Program(program.make, program.verbs[:start] + program.verbs[start + chunk :])
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


__all__: Sequence[str] = (
    "Program",
    "draw_program",
    "failure_of",
    "law_of",
    "run_program",
    "shrink",
)
