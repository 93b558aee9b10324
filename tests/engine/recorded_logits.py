"""A model whose every logits row is remembered by the tokens that it follows."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from cotrt import LLM, models
from cotrt.plan import StepPlan
from cotrt.testing import ScriptedModel


class RecordedLogits:
    """Bits of logits by path, over any number of engines.

    Attributes:
        bits: path -> digest of the first logits computed for it.
        num_again: rows computed for a path that was there already.
        different: paths for which some bit differed from the first.
    """

    def __init__(self) -> None:
        self.bits: dict[tuple[int, ...], bytes] = {}
        self.num_again = 0
        self.different: list[tuple[int, ...]] = []

    def add(self, path: tuple[int, ...], logits: torch.Tensor) -> None:
        assert bool(logits.isfinite().all())
        digest = hashlib.blake2b(logits.view(torch.int32).numpy().tobytes()).digest()
        first = self.bits.setdefault(path, digest)
        if first is not digest:
            self.num_again += 1
        if first != digest:
            self.different.append(path)


class RecordedModel:
    """A loaded model; what each logits row follows is read back through the step's own plan."""

    eos_token_ids = frozenset({2})

    def __init__(self, model: Any, record: RecordedLogits) -> None:
        self._model, self._record = model, record
        self._paths: list[tuple[int, ...]] = []
        self._shadow = ScriptedModel(self._note, vocab_size=model.vocab_size, eos_token_id=2)
        self.tokenizer = self._shadow.tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def _note(self, path: list[int]) -> dict[int, float]:
        self._paths.append(tuple(path))
        return {0: 1.0}

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        self._model.allocate_kv(num_blocks, block_size)
        self._shadow.allocate_kv(num_blocks, block_size)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._model.copy_blocks(pairs)
        self._shadow.copy_blocks(pairs)

    def run(self, step: StepPlan) -> torch.Tensor:
        logits: torch.Tensor = self._model.run(step)
        self._paths.clear()
        self._shadow.run(step)
        for path, row in zip(self._paths, logits, strict=True):
            self._record.add(path, row)
        return logits


def open_recorded(
    folder: Path,
    record: RecordedLogits,
    num_tokens: int = 1 << 13,
    *,
    deterministic: bool = True,
    load: dict[str, Any] | None = None,
    **options: Any,
) -> LLM:
    """An engine over ``folder`` with a pool of ``num_tokens`` that notes its logits."""
    loaded = models.load(folder, deterministic=deterministic, **(load or {}))
    model = RecordedModel(loaded.model, record)
    return LLM(
        model,
        deterministic=deterministic,
        kv_cache_memory_bytes=num_tokens * loaded.model.kv_bytes_per_token,
        **options,
    )
