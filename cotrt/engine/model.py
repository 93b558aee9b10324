"""What the engine asks of a model: logits for a step's rows, KV written where the plan says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeGuard

from cotrt.plan import KVShape, StepPlan, UInt8

if TYPE_CHECKING:
    import torch

    from cotrt.sampling.sampler import SampleKernel


class StepModel(Protocol):
    """A model with its KV cache. `models.Decoder` and `testing.ScriptedModel` are two.

    Attributes:
        vocab_size: width of the logits.
        max_model_len: tokens that a sequence may have.
        kv_bytes_per_token: bytes of KV of one token, all layers.
        backend_name: the kernels that it runs on.
        row_errors: optional; by logits row of the last run, why its logits are NaN.
        plan_options: arguments of ``tree.attention.costs.PlanCosts`` for these kernels.
        kv_shape: layout of records, what `read_blocks` gives and `write_blocks` takes.
        fingerprint: equal for models that compute the same KV (weights, dtype, RoPE); empty where
            it is not known, and then no record outlives the model.
        computed_under: optional; with deterministic=True what else decides the bits of KV (machine,
            versions, ...), in words; empty where bits are not promised.
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


def computed_under(model: StepModel) -> str:
    """What decides the bits of the model's KV besides its fingerprint; empty without a promise."""
    return str(getattr(model, "computed_under", ""))


def kv_name(model: StepModel) -> str:
    """Models of one name may use each other's KV: no promise is broken by it."""
    under = computed_under(model)
    return f"{model.fingerprint}, deterministic: {under}" if under else model.fingerprint


class HostCopy(Protocol):
    """Tensors on their way to the host."""

    def wait(self) -> list[torch.Tensor]:
        """The tensors on the host, once the device has come that far."""


class RecordCopy(Protocol):
    """Records on their way to the host.

    Attributes:
        seconds: what the copy itself took, once it was waited for.
    """

    seconds: float

    def wait(self) -> UInt8:
        """What `read_blocks` gives, once the device has come that far."""


class AsynchronousModel(StepModel, Protocol):
    """A model on a device that runs behind the host: its methods enqueue, in one order, and return.

    The engine then schedules step k + 1 while step k runs (docs/pipeline.md). What it relies on:

    - Everything that touches the KV (`run`, `copy_blocks`, reads and writes of records) takes
      place in the order of the calls. `read_blocks` waits for all that was enqueued before,
      `start_reading` does not.
    - Arrays of a plan and of a batch never change once they were given, so they may be read late.
    - An error may come out of the call or out of ``HostCopy.wait``: either ends the requests of
      the step, and of the one that was enqueued behind it.

    Attributes:
        is_asynchronous: True; models without the attribute run each step to its end.
        sample: the backend's sampling kernel, with tensors of the device as results; token ids
            are -1 in bad draws.
    """

    is_asynchronous: bool
    sample: SampleKernel

    def run(self, step: StepPlan, input_ids: torch.Tensor | None = None) -> torch.Tensor:
        """As ``StepModel.run``; the logits need to last only until the next run.

        Args:
            step: the rows. Its ``input_ids`` are all -1 where the argument stands in for them.
            input_ids: int32 ``[T]`` on the device, what `sample` gave for the step before. A bad
                draw's -1 stands for any token: its row is dropped.
        """

    def start_reading(self, blocks: Sequence[int]) -> RecordCopy:
        """Take records of whole blocks, in the order of the other calls, and return.

        They come to the host beside the steps that follow, which may write the blocks.
        """

    def fetch(self, *tensors: torch.Tensor) -> HostCopy:
        """Start to copy tensors to the host, at least one, in the order of the other calls."""


def is_asynchronous(model: StepModel) -> TypeGuard[AsynchronousModel]:
    """Whether `model` enqueues its steps."""
    return bool(getattr(model, "is_asynchronous", False))
