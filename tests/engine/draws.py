"""How the arguments of a random program's verbs are drawn, and which methods are its verbs."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

PHRASES = [[1, 2, 3, 1, 2, 3, 1, 3], [2, 2, 1, 3, 3, 1, 2, 1], [3, 1, 1, 2, 2, 3, 3, 2]]
Draw = Callable[[random.Random], Any]
Method = TypeVar("Method", bound=Callable[..., Any])


def number(pick: random.Random) -> int:
    """What a verb makes its own choices from."""
    return pick.randrange(1 << 20)


def flag(pick: random.Random) -> bool:
    return pick.random() < 0.5


def ids(pick: random.Random) -> list[int]:
    """Some tokens, out of so few that branches come to have prefixes in common.

    In two of five there are blocks that come again under another path.
    """
    kind = pick.randrange(5)
    if kind == 0:
        return [pick.randint(1, 3)] * pick.randint(1, 40)
    if kind == 1:
        return PHRASES[pick.randrange(len(PHRASES))] * pick.randint(1, 5)
    return [pick.randint(1, 3) for _ in range(pick.randint(1, 24))]


def among(*values: Any) -> Draw:
    return lambda pick: pick.choice(values)


def several(draw: Draw, least: int, most: int) -> Draw:
    return lambda pick: [draw(pick) for _ in range(pick.randint(least, most))]


def distinct_ids(pick: random.Random) -> list[list[int]]:
    return [list(o) for o in dict.fromkeys(tuple(ids(pick)) for _ in range(pick.randint(1, 3)))]


@dataclass(frozen=True)
class Verb:
    """How often a method is called, and how its arguments are drawn."""

    weight: float
    draws: dict[str, Draw]

    def arguments(self, pick: random.Random) -> dict[str, Any]:
        return {name: draw(pick) for name, draw in self.draws.items()}


def verb(weight: float, **draws: Draw) -> Callable[[Method], Method]:
    """Make a method a verb of random programs."""

    def mark(method: Method) -> Method:
        method.verb = Verb(weight, draws)  # type: ignore[attr-defined]
        return method

    return mark


def verbs_of(machine: type) -> dict[str, Verb]:
    """The verbs of a class by name, in the order of their names."""
    found = {name: getattr(getattr(machine, name), "verb", None) for name in sorted(dir(machine))}
    return {name: each for name, each in found.items() if each is not None}
