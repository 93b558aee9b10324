"""Random programs over tiny pools: exact reuse, exact counters, nothing leaks."""

from __future__ import annotations

import os

from run_programs import run_programs
from tree_program import TreeProgram

NUM_PROGRAMS = int(os.environ.get("COTRT_PROGRAMS", "500"))


def test_branches_of_random_programs_go_on_as_from_scratch() -> None:
    run_programs(TreeProgram, NUM_PROGRAMS)
