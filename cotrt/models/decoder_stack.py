"""A whole decoder on the native kernels: one call a step, the GIL given up once.

`CpuDecoder` has the engine's ``StepModel`` surface; its layers are kernels/cpu/csrc's. It is built
from a config, named tensors and a rotary table, all by their shape only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ..errors import InvalidRequestError
from ..kernels.cpu.copy_blocks import copy_blocks
from ..kernels.cpu.kv_cache import new_kv_cache, read_blocks, write_blocks
from ..kernels.cpu.linear import PackedWeight
from ..kernels.cpu.native import compute_dtype, dtype_of, isa, module
from ..kernels.cpu.tree_attention import prepare_plan
from ..kernels.not_finite import part_names
from ..plan import Int32, KVShape, StepPlan, UInt8


class DecoderConfig(Protocol):
    """What is read of a model's config."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_q_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def tie_word_embeddings(self) -> bool: ...


class TensorSpec(Protocol):
    """A tensor's name in the source."""

    @property
    def name(self) -> str: ...


class TensorSource(Protocol):
    """Named tensors, mapped where their storage allows."""

    def get(self, name: str) -> Tensor: ...


class Rotary(Protocol):
    """cos and sin by position, float32 ``[T, rot_dim / 2]``."""

    def reserve(self, length: int) -> None: ...
    def gather(self, positions: Tensor) -> tuple[Tensor, Tensor]: ...


def refusal(config: DecoderConfig) -> str | None:
    """Why the stack cannot serve a model; None where it can."""
    if config.intermediate_size % 16:
        return f"intermediate_size {config.intermediate_size} is not a multiple of 16"
    if config.hidden_size % 2:
        return f"hidden_size {config.hidden_size} is odd"
    return None


class CpuDecoder:
    """A causal language model whose layers run natively; implements the engine's ``StepModel``.

    The residual stream and q, k, v before the rotation are float32; weights are packed once and
    their source is not kept. A tied embedding is one packed copy for lookup and product.

    Attributes:
        vocab_size: columns of the logits.
        max_model_len: the longest sequence it is right for.
        kv_bytes_per_token: over all layers.
        backend_name: ``cpu``.
        weight_bytes: of the packed weights: what a step of one row reads.
        kv_caches: one (k, v) pair a layer after `allocate_kv`.
        kv_shape: layout of records (`read_blocks`); fingerprint, computed_under: set by the
            loader.
    """

    backend_name = "cpu"
    fingerprint = ""
    computed_under = ""

    def __init__(
        self,
        config: DecoderConfig,
        source: TensorSource,
        table: tuple[Sequence[TensorSpec], Sequence[Mapping[str, TensorSpec]]],
        rotary: Rotary,
        *,
        dtype: torch.dtype,
        quantization: str | None = None,
        max_model_len: int | None = None,
        deterministic: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Pack the weights.

        Args:
            config: of the model.
            source: its tensors; read once, one at a time.
            table: names outside the layers (embedding, norm, head unless tied), and one mapping a
                layer from role (``q``, ``q_bias``, ``input_norm``, ...) to name.
            rotary: angles by position.
            dtype: of weights and KV: bfloat16, float32, or float16, which becomes float32.
            quantization: None or "int8": one scale an output channel, activations in bfloat16.
            max_model_len: where lower than the config's.
            deterministic: a row's logits do not depend on the step that it is computed in; its
                attention plans must have fixed chunks.
            progress: called with (layers done, layers in all).

        Raises:
            InvalidRequestError: a quantization that is not known, or int8 beside float32.
        """
        reason = refusal(config)
        assert reason is None, reason
        self.config = config
        self.dtype = compute_dtype(dtype)
        self.vocab_size = config.vocab_size
        self.max_model_len = max_model_len or config.max_model_len
        self.kv_bytes_per_token = (
            2 * config.num_layers * config.num_kv_heads * config.head_dim * self.dtype.itemsize
        )
        self.kv_caches: list[tuple[Tensor, Tensor]] = []
        self.weight_bytes = 0
        self._rotary = rotary
        if quantization not in (None, "int8"):
            raise InvalidRequestError(
                f"quantization {quantization!r} is unknown; on a CPU it is None or 'int8'."
            )
        if quantization == "int8":
            self.dtype = torch.bfloat16
            self.kv_bytes_per_token = (
                2 * config.num_layers * config.num_kv_heads * config.head_dim * 2
            )
        self.kv_shape = KVShape(
            config.num_layers,
            2,
            config.num_kv_heads,
            config.head_dim,
            str(self.dtype).removeprefix("torch."),
        )
        self._weight_dtype = torch.int8 if quantization == "int8" else self.dtype
        self._cos, self._sin = rotary.gather(torch.zeros(1, dtype=torch.int64))
        self._stack: Any = module().DecoderStack(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_layers,
            num_q_heads=config.num_q_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rot_dim=2 * self._cos.shape[1],
            rms_norm_eps=config.rms_norm_eps,
            dtype=dtype_of(torch.empty(0, dtype=self.dtype)),
            **({"fixed_order": True} if deterministic else {}),
        )
        outer, layers = table
        for index, layer in enumerate(layers):
            self._bind_layer(index, source, layer)
            if progress is not None:
                progress(index + 1, len(layers))
        embed = self._pack(source, {"w": outer[0]}, ("w",)).native
        norm = source.get(outer[1].name).float().tolist()
        head = embed if len(outer) < 3 else self._pack(source, {"w": outer[2]}, ("w",)).native
        self._stack.set_outer(embed, head, norm)

    def _pack(
        self,
        source: TensorSource,
        layer: Mapping[str, TensorSpec],
        roles: Sequence[str],
        interleave: bool = False,
    ) -> PackedWeight:
        biased = f"{roles[0]}_bias" in layer
        packed = PackedWeight(
            [source.get(layer[role].name) for role in roles],
            dtype=self._weight_dtype,
            biases=[source.get(layer[f"{r}_bias"].name) for r in roles] if biased else None,
            interleave=interleave,
        )
        self.weight_bytes += packed.native.bytes
        return packed

    def _bind_layer(
        self, index: int, source: TensorSource, layer: Mapping[str, TensorSpec]
    ) -> None:
        def norm(role: str) -> list[float]:
            weights: list[float] = source.get(layer[role].name).float().tolist()
            return weights

        self._stack.set_layer(
            index,
            input_norm=norm("input_norm"),
            qkv=self._pack(source, layer, ("q", "k", "v")).native,
            q_norm=norm("q_norm") if "q_norm" in layer else [],
            k_norm=norm("k_norm") if "k_norm" in layer else [],
            o=self._pack(source, layer, ("o",)).native,
            post_norm=norm("post_norm"),
            gate_up=self._pack(source, layer, ("gate", "up"), interleave=True).native,
            down=self._pack(source, layer, ("down",)).native,
        )

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        """Make the KV pool: ``num_blocks`` of ``block_size`` tokens, zeros touched as it fills."""
        config = self.config
        self.kv_caches = []  # the old pool goes before the new one comes
        self.kv_caches = new_kv_cache(
            config.num_layers, num_blocks, block_size, config.num_kv_heads, config.head_dim,
            self.dtype, "cpu",
        )  # fmt: skip
        addresses = [(k.data_ptr(), v.data_ptr()) for k, v in self.kv_caches]
        self._stack.bind_kv(addresses, num_blocks, block_size)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, ``(source, destination)`` each, in every layer."""
        copy_blocks(self.kv_caches, pairs)

    def read_blocks(self, blocks: Sequence[int]) -> UInt8:
        """Records of whole blocks, uint8 ``[n, block_size * kv_shape.token_bytes]``."""
        return read_blocks(self.kv_caches, blocks)

    def write_blocks(self, blocks: Sequence[int], records: UInt8) -> None:
        """Put records into blocks; no block twice."""
        write_blocks(self.kv_caches, blocks, records)

    def run(self, step: StepPlan) -> Tensor:
        """Compute the rows of a step.

        Args:
            step: its copies are done already; ids are below ``vocab_size`` and positions below
                ``max_model_len``.

        Returns:
            Logits ``[R, vocab_size]`` float32 of ``step.logits_rows``.
        """
        return self._run(step)

    def find_not_finite(self, step: StepPlan) -> list[str | None]:
        """Run a step again, the same KV with it, and look between the parts of every layer.

        Returns:
            Which part is the first to give NaN or infinity, by logits row; None for rows whose
            logits are finite.
        """
        firsts = np.full(len(step.input_ids), -1, np.int32)
        finite = torch.isfinite(self._run(step, firsts)).all(-1).tolist()
        return part_names(firsts[step.logits_rows].tolist(), finite, self.config.num_layers)

    def _run(self, step: StepPlan, firsts: Int32 | None = None) -> Tensor:
        assert self.kv_caches, "allocate_kv comes before run"
        # No torch operation here: each gives the GIL away, and beside a busy Python thread getting
        # it back takes 5 ms. The native call does so once.
        logits = np.empty((len(step.logits_rows), self.vocab_size), np.float32)
        if len(step.input_ids):
            self._reserve_angles(int(step.positions.max()) + 1)
            self._stack.run(
                prepare_plan(step.attention), step.input_ids, step.slot_mapping,
                self._cos.data_ptr(), self._sin.data_ptr(), len(self._cos), step.logits_rows,
                logits.ctypes.data, *(() if firsts is None else (firsts.ctypes.data,)),
            )  # fmt: skip
        return torch.from_numpy(logits)

    def _reserve_angles(self, length: int) -> None:
        """Angles of positions below ``length``, a table that grows by doubling."""
        if length > len(self._cos):
            length = max(length, min(2 * len(self._cos), self.max_model_len), 1024)
            self._rotary.reserve(length)
            cos, sin = self._rotary.gather(torch.arange(length))
            self._cos, self._sin = cos.contiguous(), sin.contiguous()

    def interrupt(self) -> None:
        """Break off the step that runs, and refuse all later ones: the program ends."""
        self._stack.interrupt()

    def timings(self, reset: bool = False) -> dict[str, float]:
        """Seconds in each kind of phase since the last reset."""
        found = dict(self._stack.timings())
        if reset:
            self._stack.reset_timings()
        return found

    @property
    def isa(self) -> str:
        """The instruction set in use."""
        return isa()
