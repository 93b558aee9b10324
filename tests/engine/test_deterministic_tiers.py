"""24 branches in a third of their room: from every tier the bits of a large pool."""

from __future__ import annotations

import functools
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "models"))
from checkpoints import make_model, save

from cotrt import LLM, models
from cotrt.engine.records.record_stores import TierOptions

POOL = 3072  # tokens: all 24 branches fit


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = make_model("llama", std=0.12, max_position_embeddings=2048, num_hidden_layers=2)
    return save(model, tmp_path_factory.mktemp("llama"))


class OnDevice:
    """The model as if its KV lay in a device's memory, so that there is a host tier."""

    has_device_memory = True
    tokenizer = None
    eos_token_ids = frozenset({2})

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def run(folder: Path, num_tokens: int, **options: Any) -> tuple[list[Any], dict[str, int]]:
    """Tokens and bits of logprobs of 24 branches that are gone back to, and the counters."""
    loaded = models.load(folder, dtype="bfloat16", deterministic=True)
    pick = random.Random(5)
    ids = [pick.randrange(3, 200) for _ in range(1000)]
    found: list[Any] = []
    with LLM(
        OnDevice(loaded.model),
        deterministic=True,
        block_size=8,
        kv_cache_memory_bytes=num_tokens * loaded.model.kv_bytes_per_token,
        **options,
    ) as llm:
        root = llm.branch(ids[:280])
        branches = list(root.fork(24))
        for number, branch in enumerate(branches):
            branch.extend(ids[300 + number : 305 + 2 * number])
        for turn in range(3):
            running = [
                b.generate(max_tokens=15 + i % 5, temperature=1.0, ignore_eos=True, logprobs=2)
                for i, b in enumerate(branches)
            ]
            for handle in running:
                entries = handle.result()
                found.append(
                    (
                        entries.token_ids,
                        [
                            [(t, np.float32(e.logprob).tobytes()) for t, e in at.items()]
                            for at in entries.logprobs
                        ],
                    )
                )
            for branch in branches:
                branch.extend(ids[turn : turn + 4])
        return found, dict(llm.metrics)


@pytest.mark.parametrize("tier", ["none", "host", "disk"])
def test_24_branches_in_a_third_of_their_room(
    folder: Path, tmp_path: Path, tier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whatever computing costs on a tiny model, what can be moved is.
    always = functools.partial(TierOptions, always="move")
    monkeypatch.setattr("cotrt.engine.records.record_stores.TierOptions", always)
    monkeypatch.setattr("cotrt.program.llm.TierOptions", always, raising=False)
    expected, large = run(folder, POOL, swap_space=0)
    assert large["recomputed_tokens"] == 0
    options: dict[str, Any] = {
        "none": {"swap_space": 0},
        "host": {"swap_space": 0.05},
        "disk": {"swap_space": 0, "disk_space": 0.05, "disk_dir": tmp_path},
    }[tier]
    found, small = run(folder, POOL // 3, **options)
    assert found == expected
    if tier == "none":
        assert small["recomputed_tokens"] > 0
    else:
        assert small["loaded_blocks"] > 0 and small["failed_loads"] == 0
