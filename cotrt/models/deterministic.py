"""A decoder on plain torch whose rows do not depend on the batch, or why there is none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import InvalidRequestError
from ..kernels.reference import fixed_chunks
from ..kernels.reference.fixed_rows import ROWS, in_fixed_rows, is_exact

if TYPE_CHECKING:
    from ..kernels.dispatch import Backend
    from .config import ModelConfig
    from .decoder import DecoderWeights

CHUNK_TOKENS = 256


def deterministic_backend(
    backend: Backend, config: ModelConfig, weights: DecoderWeights
) -> Backend:
    """The plain torch backend in fixed shapes, checked with the model's own.

    Args:
        backend: ``reference``, on the CPU.
        config: of the model.
        weights: of the model.

    Raises:
        InvalidRequestError: torch gives a row other bits at another place of a tile here.
    """
    with torch.inference_mode():
        failed = _failed(backend, config, weights)
    if failed is not None:
        raise InvalidRequestError(
            f"deterministic=True cannot be kept on plain torch {torch.__version__} with "
            f"{torch.get_num_threads()} threads here: {failed} gives a row other bits at another "
            "place among the rows. Install cotrt's native kernels (a C++ compiler and `pip install "
            "--force-reinstall --no-deps cotrt`), or set num_threads=1."
        )
    return in_fixed_rows(backend)


def _failed(backend: Backend, config: ModelConfig, weights: DecoderWeights) -> str | None:
    """The first function whose rows are not exact."""
    generator = torch.Generator().manual_seed(0)
    dtype, layer = weights.embed.dtype, weights.layers[0]

    def rows(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.randn(ROWS, *shape, generator=generator).to(kind)

    hidden, head_dim, eps = config.hidden_size, config.head_dim, config.rms_norm_eps
    for name, weight in (
        ("qkv", layer.qkv),
        ("o", layer.o),
        ("gate_up", layer.gate_up),
        ("down", layer.down),
        ("head", weights.head),
    ):
        if not is_exact(lambda x, w=weight: backend.linear(x, w, None), rows(weight.shape[1])):
            return f"the product with {name} {tuple(weight.shape)}"
    if not is_exact(lambda x: backend.rms_norm(x, layer.input_norm, eps), rows(hidden)):
        return "the norm"
    if layer.q_norm is not None:
        norm = layer.q_norm
        for heads in (config.num_q_heads, config.num_kv_heads):
            if not is_exact(lambda x: backend.rms_norm(x, norm, eps), rows(heads, head_dim)):
                return "the norm of queries and keys"
    if not is_exact(backend.silu_and_mul, rows(2 * config.intermediate_size)):
        return "silu"
    if not fixed_chunks.is_exact(config.num_q_heads, config.num_kv_heads, head_dim, CHUNK_TOKENS):
        return "attention"
    return None
