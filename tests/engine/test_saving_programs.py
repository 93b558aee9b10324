"""Random programs that save and load branches while steps run, in pools of 2 to 64 blocks."""

from __future__ import annotations

import os

from run_programs import run_programs
from saving_rules import SavingProgram

NUM_PROGRAMS = int(os.environ.get("COTRT_PROGRAMS", "20"))


def test_saved_and_loaded_branches_go_on_as_from_scratch() -> None:
    run_programs(SavingProgram, NUM_PROGRAMS, shrink=False)
