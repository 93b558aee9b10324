"""These tests run in Triton's interpreter (TRITON_INTERPRET=1), or on a CUDA device without it.

With neither they are not collected here: `test_in_interpreter.py` runs them in a process with the
variable set.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if INTERPRETED or torch.cuda.is_available() else ["test_*.py"]

_TESTS = Path(__file__).parents[3]
for _folder in (_TESTS / "tree/attention", _TESTS / "kernels", _TESTS / "models"):
    sys.path.insert(0, str(_folder))

if INTERPRETED:
    import interpreter_repair

    interpreter_repair.apply()


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cpu" if INTERPRETED else "cuda")
