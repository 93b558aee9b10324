"""Threads and loops on one LLM at random, against a solo run; see scripts/storm.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_a_storm_of_20_seconds_breaks_nothing(repository: Path):
    done = subprocess.run(
        [sys.executable, "scripts/storm.py", "--seconds", "20"],
        cwd=repository,
        env={**os.environ, "PYTHONPATH": str(repository), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal a solo run" in done.stdout
