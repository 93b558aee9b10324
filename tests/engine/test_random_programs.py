"""Random programs over tiny pools: exact reuse, exact counters, nothing leaks, nothing is lost."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from program_runner import draw_program, failure_of, law_of, run_program, shrink
from quick_sampling import quickly
from tier_verbs import TIERS

# Verbs and steps of the engine, in all programs together.
NUM_STEPS = 24_000
NUM_VERBS = 80

# Settings, beside drawn ones, of a quarter of the programs each; and what has to come about there.
GROUPS: dict[str, tuple[dict[str, list[Any]], list[str]]] = {
    "all drawn": (
        {},
        [
            "no memory", "files loaded", "no space for a file", "loaded files damaged", "leases",
            "leases refused", "10000 forks at once", "50 forks at once", "large pools with tiers",
            "records cut", "ended by RuntimeError", "ended by MemoryError",
            "ended by NumericsError", "ended by ZeroDivisionError", "ended by LookupError",
        ],
    ),
    "memory tiers": (
        {"tiers": [tiers for tiers in TIERS if tiers != "none"], "num_blocks": [3, 4, 5, 6, 8]},
        [
            "stored", "loaded", "failed loads", "the disk was full", "files loaded", "records cut",
            "records flipped", "records removed", "records gone", "damaged records read",
            "ended by NumericsError",
        ],
    ),
    "a late device": (
        {"late": list(range(12))},
        [
            f"late: {fence}"
            for fence in (
                "fork", "prune", "cancel", "go on otherwise", "copy", "free", "reuse", "dropped",
                "all dropped", "between", "fail ahead", "ahead",
            )
        ]
        + ["ended by NumericsError"],
    ),
    "a late device with tiers": (
        {"late": list(range(12)), "tiers": ["host", "small host", "both"], "num_blocks": [4, 8]},
        ["late: load", "late: store", "records gone", "ended by NumericsError"],
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def quick_collections() -> Iterator[None]:
    """No collection looks at what was there before."""
    gc.collect()
    gc.freeze()
    logging.getLogger("cotrt").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("cotrt").setLevel(logging.NOTSET)
    gc.unfreeze()


@pytest.mark.parametrize("group", GROUPS)
def test_branches_of_random_programs_go_on_as_from_scratch(group: str) -> None:
    with contextlib.nullcontext() if group == "all drawn" else quickly():
        _run_group(group)


def _run_group(group: str) -> None:
    settings, wanted = GROUPS[group]
    num_steps, number, happened = 0, 1000 * list(GROUPS).index(group), Counter[str]()
    while num_steps < NUM_STEPS / len(GROUPS):
        chosen = {name: values[number % len(values)] for name, values in settings.items()}
        program = draw_program(number, NUM_VERBS, **chosen)
        if not num_steps:
            program.verbs.insert(NUM_VERBS // 2, ("storm", {"pick": 64, "n": 10_000}, 0))
        try:
            outcome = run_program(program)
        except Exception:
            smallest = shrink(program)
            failure = failure_of(smallest) or "it failed once, and not again"
            pytest.fail(f"program {number}: {law_of(failure)}\n{smallest}\n{failure}")
        num_steps += outcome.num_verbs + outcome.num_steps
        happened.update(outcome.happened)
        number += 1
    missing = [what for what in wanted if not happened[what]]
    assert not missing, f"no program of {number % 1000} came to {missing}"
