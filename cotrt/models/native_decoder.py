"""The decoder whose whole stack of layers is one native call a step (CPU)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ..kernels.dispatch import plan_options
from .config import ModelConfig
from .decoder_stack import CpuDecoder, refusal
from .rope import RotaryTable
from .weights import WeightSource, tensor_table

__all__ = ["NativeDecoder", "refusal"]


class NativeDecoder(CpuDecoder):
    """`CpuDecoder` for a model of ours; weights are packed straight from the mapped source.

    Attributes:
        plan_options: the attention planner's cost constants for these kernels and heads.
    """

    def __init__(
        self,
        config: ModelConfig,
        source: WeightSource,
        *,
        dtype: torch.dtype,
        quantization: str | None = None,
        max_model_len: int | None = None,
        deterministic: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Pack the weights of a source that passed ``check_tensors``.

        Args:
            config: of the same model.
            source: read one tensor at a time; may be closed afterwards.
            dtype: of weights and KV; float16 is computed and stored in float32.
            quantization: None or "int8".
            max_model_len: where it differs from the config's.
            deterministic: logits do not depend on the batch.
            progress: called with the number of layers done.
        """
        super().__init__(
            config,
            source,
            tensor_table(config),
            RotaryTable(config.rope, "cpu"),
            dtype=dtype,
            quantization=quantization,
            max_model_len=max_model_len,
            deterministic=deterministic,
            progress=None if progress is None else lambda done, total: progress(done),
        )
        self.plan_options: Mapping[str, int] = plan_options(
            "cpu", config.num_q_heads, config.num_kv_heads, config.head_dim, self.dtype.itemsize
        )
