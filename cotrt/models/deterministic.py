"""Kernels whose rows do not depend on the batch, for a `Decoder`, or why there are none."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import InvalidRequestError
from ..kernels.cuda import on_device
from ..kernels.reference import fixed_chunks
from ..kernels.reference.fixed_rows import ROWS, in_fixed_rows, is_exact

if TYPE_CHECKING:
    from ..kernels.dispatch import Backend
    from .config import ModelConfig
    from .decoder import DecoderWeights

CHUNK_TOKENS = 256


def deterministic_backend(
    backend: Backend, config: ModelConfig, weights: DecoderWeights, block_size: int
) -> Backend:
    """A backend in fixed shapes, checked with the model's own.

    Args:
        backend: ``triton``, or ``reference`` on the CPU.
        config: of the model.
        weights: of the model.
        block_size: tokens a KV block.

    Raises:
        InvalidRequestError: plain torch on a GPU; or a row has other bits at another place of a
            tile here.
    """
    device = weights.embed.device
    if backend.name == "triton":
        return _triton_backend(backend, config, weights, block_size)
    assert backend.name == "reference", backend.name
    if device.type != "cpu":
        raise InvalidRequestError(
            f'deterministic=True on device "{device}" needs the Triton kernels, and the model '
            f"runs as {backend.name} ({backend.why}): products of plain torch depend on the batch "
            'there. Use device="cpu", or leave it out.'
        )
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


def _triton_backend(
    backend: Backend, config: ModelConfig, weights: DecoderWeights, block_size: int
) -> Backend:
    from ..kernels.triton.fixed_rows import in_fixed_rows as with_fixed_linear

    exact, device = with_fixed_linear(backend), weights.embed.device
    if device.type != "cuda":  # in the interpreter, which takes seconds for it; the tests look
        return exact
    with torch.inference_mode(), on_device(device):
        failed = _failed_on_gpu(exact, config, weights, block_size)
    if failed is not None:
        raise InvalidRequestError(
            f"deterministic=True cannot be kept on {torch.cuda.get_device_name(device)}: {failed} "
            "gives a row other bits in another batch, which is a fault of cotrt's kernels or of "
            'this version of Triton. Please report it; use device="cpu", or leave it out.'
        )
    return exact


def _failed_on_gpu(
    backend: Backend, config: ModelConfig, weights: DecoderWeights, block_size: int
) -> str | None:
    """The first function of the Triton kernels whose rows are not their own."""
    from ..kernels.triton.self_check import NUM_ROWS, is_attention_own, is_own

    device, dtype = weights.embed.device, weights.embed.dtype
    generator = torch.Generator().manual_seed(0)

    def rows(size: int) -> Tensor:
        return torch.randn(NUM_ROWS, size, generator=generator).to(device, dtype)

    for name, weight in _products(weights):
        if not is_own(partial(backend.linear, weight=weight), rows(weight.shape[1])):
            return f"the product with {name} {tuple(weight.shape)}"
    norm, eps = weights.layers[0].input_norm, config.rms_norm_eps
    if not is_own(lambda x: backend.rms_norm(x, norm, eps), rows(config.hidden_size)):
        return "the norm"
    shape = (config.num_q_heads, config.num_kv_heads, config.head_dim, block_size)
    return None if is_attention_own(*shape, dtype, device) else "attention"


def _products(weights: DecoderWeights) -> list[tuple[str, Tensor]]:
    """Each kind of weight, named."""
    layer = weights.layers[0]
    return [
        ("qkv", layer.qkv),
        ("o", layer.o),
        ("gate_up", layer.gate_up),
        ("down", layer.down),
        ("head", weights.head),
    ]


def _failed(backend: Backend, config: ModelConfig, weights: DecoderWeights) -> str | None:
    """The first function of plain torch whose rows are not exact."""
    generator = torch.Generator().manual_seed(0)
    dtype, layer = weights.embed.dtype, weights.layers[0]

    def rows(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.randn(ROWS, *shape, generator=generator).to(kind)

    hidden, head_dim, eps = config.hidden_size, config.head_dim, config.rms_norm_eps
    for name, weight in _products(weights):
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
