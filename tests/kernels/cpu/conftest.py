"""The native kernels' tests: skipped, and said so, where the extension was not built."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# native_caches, and attention_oracle that is shared with the reference's tests.
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from cotrt.kernels.cpu.native import missing_reason  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = missing_reason()
    if reason is None:
        return
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and not item.name.startswith("test_without_the_module"):
            item.add_marker(pytest.mark.skip(reason=reason))
