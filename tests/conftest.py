"""What every test shares."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

# No test may reach a model hub; a hub id must come from the cache or fail at once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import pytest

# A shell's background job ignores Ctrl-C, and so would every program that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parent.parent

# Test files of two rooms may have one name (pytest imports each by its path), so helpers are found
# here: any test imports the helpers of its own room, or of another, by their bare names.
sys.path += sorted({str(path.parent) for path in (ROOT / "tests").glob("*/**/*.py")} - {*sys.path})

from isolation import pytest_runtest_makereport  # noqa: E402

__all__ = ["pytest_runtest_makereport"]  # a hook of every test


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def repository() -> Path:
    """The folder that holds the package, the examples and the docs."""
    return ROOT
