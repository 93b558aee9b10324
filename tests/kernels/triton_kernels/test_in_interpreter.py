"""Runs `interpreted/` in a process of its own: the interpreter is chosen at the first import."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"
ROOT = Path(__file__).parents[3]


def test_kernels_in_the_interpreter():
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        pytest.skip("triton is not installed: the extra dev brings it")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER)]
    run = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    print(run.stdout[-6000:], run.stderr[-2000:])
    assert run.returncode == 0, "a kernel differs from the reference (output above)"
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed and int(passed[1]) > 50, "the interpreted tests were not collected"
