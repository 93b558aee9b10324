"""Random programs over tiny pools: exact reuse, exact counters, nothing leaks."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from tree_program import TreeProgram

NUM_PROGRAMS = int(os.environ.get("COTRT_PROGRAMS", "500"))


def test_branches_of_random_programs_go_on_as_from_scratch() -> None:
    run_state_machine_as_test(
        TreeProgram,
        settings=settings(
            max_examples=NUM_PROGRAMS,
            stateful_step_count=40,
            deadline=None,
            database=None,
            derandomize="COTRT_PROGRAMS" not in os.environ,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink],
            print_blob=False,
        ),
    )
