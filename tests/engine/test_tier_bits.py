"""deterministic=True with tiers: KV that was moved gives the same bits as KV that stayed."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "models"))
from checkpoints import make_model, save

from cotrt import LLM
from cotrt.kernels.cpu.native import missing_reason
from cotrt.tree.tiers.tier_costs import TierCosts

VOCAB = 203
needs_native = pytest.mark.skipif(missing_reason() is not None, reason=str(missing_reason()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = make_model("llama", std=0.12, vocab_size=VOCAB)
    return save(model, tmp_path_factory.mktemp("llama"))


def chats(llm: LLM) -> list[Any]:
    """Tokens and logprobs of 24 branches that are gone back to once."""
    pick = random.Random(0)
    root = llm.branch([pick.randrange(3, VOCAB) for _ in range(40)])
    branches = root.fork(24)
    for _ in range(2):
        for branch in branches:
            branch.extend([pick.randrange(3, VOCAB) for _ in range(9)])
        branches.generate(max_tokens=14, ignore_eos=True, temperature=0.8).result()
    return [(b.token_ids, b.logprobs) for b in branches]


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param({"dtype": "bfloat16"}, marks=needs_native),
        {"dtype": "float32", "attention_backend": "reference"},
    ],
    ids=["cpu", "reference"],
)
@pytest.mark.parametrize("tier", ["recompute", "disk", "kept"])
def test_bits_do_not_depend_on_where_kv_was(
    kind: dict[str, Any], tier: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TierCosts, "_moves", lambda self, num_tokens, seconds: True)
    tiers: dict[str, Any] = {
        "recompute": {},
        "disk": {"disk_space": 0.25, "disk_dir": tmp_path},
        "kept": {"prefix_cache_dir": tmp_path / "kept"},
    }[tier]
    token_bytes = 2 * 2 * 2 * 16 * (2 if kind["dtype"] == "bfloat16" else 4)
    with LLM(folder, deterministic=True, kv_cache_memory_bytes=4096 * token_bytes, **kind) as llm:
        large = chats(llm)
        needed = 3 + 24 * 3  # blocks: 40 tokens in common, 46 each
    small = needed // 3 * 16 * token_bytes
    with LLM(folder, deterministic=True, kv_cache_memory_bytes=small, **kind, **tiers) as llm:
        assert chats(llm) == large
        metrics = llm.metrics
        assert llm.memory().total <= needed // 3
        assert (metrics["loaded_tokens"] > 0) == (tier != "recompute")
        assert metrics["failed_loads"] == 0
    if tier == "kept":  # and the next process goes on from what this one kept
        with LLM(folder, deterministic=True, kv_cache_memory_bytes=small, **kind, **tiers) as llm:
            assert chats(llm) == large
            assert llm.metrics["loaded_tokens"] > 0
