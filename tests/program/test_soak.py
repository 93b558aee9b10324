"""Mixed work on one LLM leaves nothing behind; see scripts/soak.py for the hour."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="private memory is read from /proc")
def test_twenty_seconds_of_mixed_work_leave_nothing_behind(repository: Path):
    done = subprocess.run(
        [sys.executable, "scripts/soak.py", "--minutes", "0.33"],
        cwd=repository,
        env={**os.environ, "PYTHONPATH": str(repository), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["metrics"]["steps"] > 0 and sum(found["done"].values()) > 0
