"""What branches and works have to be, kept beside the engine by the rules of the API alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from cotrt.engine.state import GenerationState
from cotrt.options.sampling import SamplingParams
from cotrt.program.branch import Branch

MAX_LEN = 120
Item = TypeVar("Item")


def picked(items: Iterable[Item], number: int, key: Callable[[Item], int]) -> Item:
    """One of the items, whose keys differ: the same for as long as it is there.

    So a verb that is left out of a program changes few of the others' picks.
    """
    return min(items, key=lambda item: hash((key(item), number)))


def _random_params(number: int) -> SamplingParams:
    pick = random.Random(number)
    # Long ones are few: a step that only lengthens branches finds little.
    max_tokens = pick.choice([0, 1, 2, 3, 5, 5, 9, 9, 17, 30])
    fields: dict[str, Any] = {
        "temperature": pick.choice([0.0, 0.7, 1.0, 1.6]),
        "seed": pick.choice([None, None, None, 1, 2]),
        "max_tokens": max_tokens,
        "min_tokens": min(max_tokens, pick.choice([0, 0, 0, 0, 0, 4])),
        "ignore_eos": pick.random() < 0.5,
        "stop_token_ids": pick.choice([None, None, [3], [3, 5]]),
        "top_k": pick.choice([0, 0, 3]),
        "top_p": pick.choice([1.0, 1.0, 0.8]),
        "presence_penalty": pick.choice([0.0, 0.0, 0.0, 0.0, 0.0, 0.6]),
        "repetition_penalty": pick.choice([1.0, 1.0, 1.0, 1.0, 1.0, 1.3]),
        "logprobs": pick.choice([None, None, None, None, None, 0, 2]),
        "prompt_logprobs": pick.choice([None, None, None, None, None, None, 1]),
        "priority": pick.choice([0, 0, 0, -1, 1]),
    }
    if pick.random() < 0.25:
        fields["stop"] = [chr(pick.randrange(12)) + chr(pick.randrange(12)), chr(7)]
    return SamplingParams(**fields)


PARAMS = [_random_params(number) for number in range(96)]


@dataclass(eq=False)
class Shadow:
    """What a branch has to be.

    Attributes:
        key: what it is picked by: from the verb that made it.
    """

    branch: Branch | None  # None once the handle was given up
    ids: list[int]
    sampled: list[bool]
    seed: int
    key: int
    epoch: int = 0
    num_forks: int = 0
    parent: Shadow | None = None
    children: list[Shadow] = field(default_factory=list)
    pruned: bool = False
    busy: Running | None = None  # what makes it busy


@dataclass(eq=False)
class Running:
    """A generate, score or choose that was started."""

    kind: str
    owner: Shadow
    handle: Any
    key: int
    state: GenerationState | None = None
    start: int = 0
    ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    options: list[list[int]] = field(default_factory=list)
    given: list[int] = field(default_factory=list)
    by_mean: bool = True
    cancelled: bool = False
    seen: bool = False
