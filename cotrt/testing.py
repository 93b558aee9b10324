"""A model without weights, for programs' own tests and for ours."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from cotrt.plan import AttentionPlan, KVShape, StepPlan, UInt8

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch


class CharTokenizer:
    """Token i is the character ``chr(i)``; there are no special tokens."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        """Code points of `text`.

        Raises:
            ValueError: a character is not in the vocabulary.
        """
        ids = [ord(character) for character in text]
        if ids and max(ids) >= self.vocab_size:
            raise ValueError(f"{chr(max(ids))!r} is not among the {self.vocab_size} characters")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The characters of `ids`."""
        return "".join(map(chr, ids))


class ScriptedModel:
    """A model whose next-token probabilities are a function of the tokens before.

    Given as ``LLM(model)`` it runs the whole stack: tree, scheduler, attention plan, sampler. Its
    KV is the token ids: they are written into blocks and read back through the attention plan, so
    a wrong block, slot or group shows as an AssertionError or as wrong text.

    Args:
        next_probs: ``next_probs(token_ids) -> {token_id: probability}``; called with the tokens
            as they were read back. Tokens that are left out have probability 0; the rest is
            normalised. What it raises ends the request that it was called for, and no other.
        vocab_size: token ids are ``0 .. vocab_size - 1``.
        eos_token_id: an int, or a list of them.
        tokenizer: an object with ``encode`` and ``decode``, or a folder; without one token i is
            the character ``chr(i)``.
        max_model_len: tokens that a sequence may have.
        fingerprint: models of the same one can read each other's saved KV.
        has_device_memory: take the pool for the memory of a device, so that ``swap_space`` gives
            it a host tier.
    """

    backend_name = "scripted"
    kv_bytes_per_token = 4
    kv_shape = KVShape(1, 1, 1, 1, "int32")

    def __init__(
        self,
        next_probs: Callable[[list[int]], Mapping[int, float]],
        *,
        vocab_size: int,
        eos_token_id: int | Sequence[int],
        tokenizer: Any = None,
        max_model_len: int = 1 << 20,
        fingerprint: str = "scripted",
        has_device_memory: bool = False,
    ) -> None:
        ids = [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id)
        if vocab_size < 1 or any(not 0 <= i < vocab_size for i in ids):
            raise ValueError(f"eos_token_id={eos_token_id}: must be ids below {vocab_size=}")
        self.next_probs = next_probs
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(ids)
        self.tokenizer = CharTokenizer(vocab_size) if tokenizer is None else tokenizer
        self.max_model_len = max_model_len
        self.fingerprint = fingerprint
        self.has_device_memory = has_device_memory
        self.plan_options = {
            "kv_bytes_per_token": 4,
            "partial_bytes_per_row": 16,
            "max_group_tokens": 512,
        }
        self.row_errors: dict[int, Exception] = {}
        self._kv = np.zeros((0, 0), np.int32)

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        """Make room for the token ids of `num_blocks` blocks."""
        self._kv = np.full((num_blocks, block_size), -1, np.int32)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks; all sources are read before anything is written."""
        sources, destinations = map(list, zip(*pairs))
        self._kv[destinations] = self._kv[sources]

    def read_blocks(self, blocks: Sequence[int]) -> UInt8:
        """The token ids in whole blocks, as bytes ``[n, block_size * 4]``."""
        return self._kv[list(blocks)].view(np.uint8)

    def write_blocks(self, blocks: Sequence[int], records: UInt8) -> None:
        """Put records into blocks."""
        self._kv[list(blocks)] = np.ascontiguousarray(records).view(np.int32)

    def run(self, step: StepPlan) -> torch.Tensor:
        """Write the step's token ids, read each logits row's path back, ask `next_probs`."""
        import torch

        write = step.slot_mapping >= 0
        self._kv.reshape(-1)[step.slot_mapping[write]] = step.input_ids[write]
        logits = np.full((len(step.logits_rows), self.vocab_size), -np.inf, np.float32)
        paths = _Paths(step.attention, self._kv)
        self.row_errors = {}
        for index, row in enumerate(step.logits_rows.tolist()):
            path = paths.of(row)
            assert path[-1] == step.input_ids[row], (
                f"row {row} is token {step.input_ids[row]}, its KV slot holds {path[-1]}"
            )
            try:
                for token, probability in self.next_probs(path).items():
                    if probability > 0:
                        logits[index, self._checked(token)] = math.log(probability)
            except Exception as error:  # of this row alone: the others go on
                logits[index] = np.nan
                self.row_errors[index] = error
        return torch.from_numpy(logits)

    def _checked(self, token: int) -> int:
        if not 0 <= token < self.vocab_size:
            raise ValueError(
                f"next_probs gave a probability for token {token}; the vocabulary ends at "
                f"{self.vocab_size - 1}"
            )
        return token


class _Paths:
    """The tokens that the rows of a step see, each read through exactly one group of its plan."""

    def __init__(self, plan: AttentionPlan, kv: npt.NDArray[np.int32]) -> None:
        self._kv, self._size = kv, plan.block_size
        self._positions = plan.query_positions.tolist()
        self._starts, self._lengths = plan.group_start.tolist(), plan.group_len.tolist()
        self._causal = plan.group_causal.tolist()
        self._blocks = plan.group_blocks
        self._block_offsets = plan.group_block_offsets.tolist()
        self._tokens: dict[int, list[int]] = {}  # by group, once a row has asked for them
        self._groups: dict[int, list[int]] = {}  # by row
        rows, offsets = plan.group_rows.tolist(), plan.group_row_offsets.tolist()
        for group in range(plan.num_groups):
            for row in rows[offsets[group] : offsets[group + 1]]:
                self._groups.setdefault(row, []).append(group)

    def of(self, row: int) -> list[int]:
        """Tokens at positions 0 to the row's own."""
        position = self._positions[row]
        path: list[int] = []
        for group in sorted(self._groups.get(row, ()), key=self._starts.__getitem__):
            start = self._starts[group]
            stop = start + self._lengths[group]
            if self._causal[group]:
                stop = min(stop, position + 1)
            assert stop <= position + 1, f"row {row} at {position} reads up to {stop - 1}"
            if stop <= start:
                continue
            assert start >= len(path), f"row {row} reads position {start} twice"
            assert start == len(path), f"row {row} at {position} does not see {len(path)}"
            path += self._of_group(group)[: stop - start]
        assert len(path) == position + 1, f"row {row} at {position} sees {len(path)} tokens"
        return path

    def _of_group(self, group: int) -> list[int]:
        tokens = self._tokens.get(group)
        if tokens is None:
            count, first = self._lengths[group], self._block_offsets[group]
            blocks = self._blocks[first : first + -(-count // self._size)]
            tokens = self._tokens[group] = self._kv[blocks].reshape(-1)[:count].tolist()
        return tokens
