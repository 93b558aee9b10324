"""Models that the tests of the program API share, opened once a run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from isolation import shared_fixture

# Helpers of other rooms: small checkpoints and tokenizers.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "models"))

from api_helpers import RIG_CHAIN, make_rig

from cotrt import LLM


@shared_fixture("session")
def smol() -> Iterator[LLM]:
    """The starter model in float32."""
    with LLM("smollm2-135m", dtype="float32", kv_cache_memory_bytes=1 << 28) as llm:
        yield llm


@pytest.fixture(scope="session")
def rig_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that says `` ABCDEFGHIJ 🦊`` after ``go:``, then ends."""
    return make_rig(tmp_path_factory.mktemp("rig"), RIG_CHAIN)


@shared_fixture("session")
def rig(rig_folder: Path) -> Iterator[LLM]:
    with LLM(rig_folder, dtype="float32", kv_cache_memory_bytes=1 << 26) as llm:
        yield llm
