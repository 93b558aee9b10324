"""What the engine asks of a model: logits for a step's rows, KV written where the plan says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from cotrt.plan import KVShape, StepPlan, UInt8

if TYPE_CHECKING:
    import torch


class StepModel(Protocol):
    """A model with its KV cache. `models.Decoder` and `testing.ScriptedModel` are two.

    Attributes:
        vocab_size: width of the logits.
        max_model_len: tokens that a sequence may have.
        kv_bytes_per_token: bytes of KV of one token, all layers.
        backend_name: the kernels that it runs on.
        row_errors: optional; by logits row of the last run, why its logits are NaN.
        plan_options: arguments of ``tree.attention_costs.PlanCosts`` for these kernels.
        kv_shape: layout of records, what `read_blocks` gives and `write_blocks` takes.
        fingerprint: equal for models that compute the same KV (weights, dtype, RoPE); empty where
            it is not known, and then no record outlives the model.
    """

    vocab_size: int
    max_model_len: int
    kv_bytes_per_token: int
    backend_name: str
    plan_options: Mapping[str, int]
    kv_shape: KVShape
    fingerprint: str

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        """Make room for `num_blocks` blocks; called once."""

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, ``(source, destination)``, in every layer; sources are read first."""

    def run(self, step: StepPlan) -> torch.Tensor:
        """Compute the rows of `step` and write their KV.

        Returns:
            float32 ``[R, vocab_size]``, the logits of ``step.logits_rows``.
        """

    def read_blocks(self, blocks: Sequence[int]) -> UInt8:
        """Records of whole blocks, slots that were never written included.

        Returns:
            uint8 ``[len(blocks), block_size * kv_shape.token_bytes]`` in host memory.
        """

    def write_blocks(self, blocks: Sequence[int], records: UInt8) -> None:
        """Put records into blocks, all their slots: the inverse of `read_blocks`.

        Args:
            blocks: no block twice.
            records: as `read_blocks` gives; not kept.
        """
