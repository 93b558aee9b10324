"""The starter model, where it is on this machine."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest

from cotrt import LLM


@functools.cache
def _is_here() -> bool:
    home = Path(os.environ.get("COTRT_HOME", "~/.cache/cotrt")).expanduser()
    return any(home.glob("**/*.safetensors"))


def starter_llm(**options: Any) -> LLM:
    """The starter model; the test is skipped where it would have to be fetched first."""
    if not _is_here():
        pytest.skip("the starter model is not on this machine")
    return LLM("smollm2-135m", **{"seed": 1, "kv_cache_memory_bytes": 2**28} | options)
