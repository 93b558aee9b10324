"""Random programs that save and load branches while steps run, in pools of 2 to 64 blocks."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from saving_rules import SavingProgram

NUM_PROGRAMS = int(os.environ.get("COTRT_PROGRAMS", "20"))


def test_saved_and_loaded_branches_go_on_as_from_scratch() -> None:
    run_state_machine_as_test(
        SavingProgram,
        settings=settings(
            max_examples=NUM_PROGRAMS,
            stateful_step_count=40,
            deadline=None,
            database=None,
            derandomize="COTRT_PROGRAMS" not in os.environ,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],
            print_blob=False,
        ),
    )
