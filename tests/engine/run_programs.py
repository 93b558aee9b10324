"""How the tests of random programs draw them: the same ones in every run, unless told how many."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test


def run_programs(
    machine: type[RuleBasedStateMachine], num_programs: int, *, shrink: bool = True
) -> None:
    """Run programs of 40 verbs; with COTRT_PROGRAMS set, others in every run.

    Args:
        machine: what draws and checks them.
        num_programs: how many.
        shrink: look for the shortest program that fails.
    """
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=num_programs,
            stateful_step_count=40,
            deadline=None,
            database=None,
            derandomize="COTRT_PROGRAMS" not in os.environ,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
            print_blob=False,
        ),
    )
