"""One decoder for the Llama, Mistral, Qwen2 and Qwen3 families, differing by data only.

The Decoder runs one `StepPlan`: ids in, K and V written by slot, attention over the tree, logits
out. What depends on the plan is turned into tensors once a step; the layers only compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.copy_streams import CopyStreams, RecordCopy
from ..kernels.cuda import CudaGraphMaker, GraphMaker, HostCopy, on_device, to_device
from ..kernels.dispatch import Backend, plan_options
from ..plan import KVShape, StepPlan, UInt8
from . import warm_up
from .config import ModelConfig
from .graphs import StepGraphs
from .rope import RotaryTable
from .weights import TensorSpec, WeightSource, tensor_table

# Block ids of the longest plan that is replayed: 1 MiB on the device.
_MAX_GRAPH_ENTRIES = 1 << 18


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one layer, merged as they are used; ``[out, in]`` each."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights of a decoder, in its dtype and on its device."""

    embed: Tensor
    layers: list[LayerWeights]
    norm: Tensor
    head: Tensor

    @classmethod
    def from_source(
        cls,
        source: WeightSource,
        config: ModelConfig,
        dtype: torch.dtype,
        device: str,
        progress: Callable[[int], None] | None = None,
    ) -> DecoderWeights:
        """Copy a checked source into merged weights, one tensor at a time.

        Each mapped tensor is read into its place in the merged one, cast on the way; nothing is
        held twice.

        Args:
            source: passed `check_tensors`.
            config: of the same model.
            dtype: of the weights.
            device: where they live.
            progress: called with the number of layers done.
        """
        outer, layers = tensor_table(config)

        def merged(specs: Sequence[TensorSpec]) -> Tensor:
            rows = sum(spec.shape[0] for spec in specs)
            out = torch.empty((rows, *specs[0].shape[1:]), dtype=dtype, device=device)
            start = 0
            for spec in specs:
                out[start : start + spec.shape[0]].copy_(source.get(spec.name))
                start += spec.shape[0]
            return out

        def maybe(layer: dict[str, TensorSpec], *roles: str) -> Tensor | None:
            return merged([layer[role] for role in roles]) if roles[0] in layer else None

        done: list[LayerWeights] = []
        for layer in layers:
            done.append(
                LayerWeights(
                    input_norm=merged([layer["input_norm"]]),
                    qkv=merged([layer["q"], layer["k"], layer["v"]]),
                    qkv_bias=maybe(layer, "q_bias", "k_bias", "v_bias"),
                    q_norm=maybe(layer, "q_norm"),
                    k_norm=maybe(layer, "k_norm"),
                    o=merged([layer["o"]]),
                    o_bias=maybe(layer, "o_bias"),
                    post_norm=merged([layer["post_norm"]]),
                    gate_up=merged([layer["gate"], layer["up"]]),
                    gate_up_bias=maybe(layer, "gate_bias", "up_bias"),
                    down=merged([layer["down"]]),
                    down_bias=maybe(layer, "down_bias"),
                )
            )
            if progress is not None:
                progress(len(done))
        embed, norm, *head = (merged([spec]) for spec in outer)
        return cls(embed=embed, layers=done, norm=norm, head=head[0] if head else embed)


class Decoder:
    """A causal language model over a paged KV cache; implements the engine's ``StepModel``.

    Attributes:
        vocab_size: columns of the logits.
        max_model_len: the longest sequence it is right for.
        kv_bytes_per_token: over all layers.
        backend_name: of the kernels it runs on.
        plan_options: the attention planner's cost constants for these kernels and heads.
        kv_shape: layout of records (`read_blocks`); fingerprint, computed_under: set by the
            loader.
        in_chunks: its attention plans are deterministic ones.
        graphs: of decode steps, after `warm_up` on a GPU; else None.
        is_asynchronous: steps are enqueued and run behind the host; `sample` draws then.
    """

    fingerprint = ""
    computed_under = ""

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        backend: Backend,
        *,
        max_model_len: int | None = None,
        in_chunks: bool = False,
    ) -> None:
        self.config = config
        self.weights = weights
        self.backend = backend
        self.device = weights.embed.device
        self.dtype = weights.embed.dtype
        self.vocab_size = config.vocab_size
        self.max_model_len = max_model_len or config.max_model_len
        self.in_chunks = in_chunks
        self.kv_bytes_per_token = 2 * config.num_layers * config.kv_size * self.dtype.itemsize
        self.kv_shape = KVShape(
            config.num_layers,
            2,
            config.num_kv_heads,
            config.head_dim,
            str(self.dtype).removeprefix("torch."),
        )
        self.backend_name: str = backend.name
        self.plan_options: Mapping[str, int] = plan_options(
            backend.name,
            config.num_q_heads,
            config.num_kv_heads,
            config.head_dim,
            self.dtype.itemsize,
        )
        self._scale = config.head_dim**-0.5
        self._rotary = RotaryTable(config.rope, str(self.device))
        self.kv_caches: list[tuple[Tensor, Tensor]] = []
        self.graphs: StepGraphs | None = None
        self.is_asynchronous = backend.new_sampler is not None
        self._copies = CopyStreams(self.device)
        if backend.new_sampler is not None:
            self.sample = backend.new_sampler(self.device)

    def warm_up(
        self,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        block_size: int,
        capture: bool = True,
        maker: GraphMaker | None = None,
    ) -> int:
        """Run the largest steps once on a GPU, before the KV pool is sized.

        What is compiled and allocated at the first use is so afterwards; graphs are recorded on
        trial, to learn what they take, and again by `allocate_kv`, for they hold the addresses of
        the KV. Does nothing on a CPU, unless `maker` is given.

        Args:
            max_num_seqs: rows of the largest decode step.
            max_num_batched_tokens: rows of the largest step.
            block_size: tokens a block.
            capture: use CUDA graphs for decode steps.
            maker: in place of CUDA's, for tests.

        Returns:
            Bytes of the GPU that steps take beside weights and KV, and that are free now.
        """
        on_gpu = self.device.type == "cuda"
        if not on_gpu and maker is None:
            return 0
        with torch.inference_mode(), on_device(self.device):
            self._rotary.reserve(self.max_model_len)  # graphs hold the table's address
            self._allocate(1, block_size)
            peak = warm_up.measure_steps(self, max_num_seqs, max_num_batched_tokens, block_size)
            if capture and self.backend.new_graph_plan is not None:
                maker = CudaGraphMaker(self.device) if maker is None else maker
                self.graphs = self._new_graphs(maker, max_num_seqs, block_size)
                peak += warm_up.measure_graphs(self.graphs, self.device)
            self.kv_caches = []
        return peak

    def _new_graphs(self, maker: GraphMaker, max_rows: int, block_size: int) -> StepGraphs:
        config = self.config
        assert self.backend.new_graph_plan is not None
        plan = self.backend.new_graph_plan(
            max_rows,
            min(max_rows * -(-self.max_model_len // block_size), _MAX_GRAPH_ENTRIES),
            config.num_q_heads // config.num_kv_heads,
            config.head_dim,
            self.dtype,
            self.device,
            in_chunks=self.in_chunks,
        )
        return StepGraphs(
            self.forward,
            plan,
            maker,
            max_rows=max_rows,
            vocab_size=self.vocab_size,
            device=self.device,
        )

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        """Make the KV pool: ``num_blocks`` of ``block_size`` tokens, zeros touched as it fills.

        After `warm_up` this records the graphs of decode steps.
        """
        with on_device(self.device):
            self._allocate(num_blocks, block_size)
            if self.graphs is not None:
                self.graphs.capture()

    def _allocate(self, num_blocks: int, block_size: int) -> None:
        config = self.config
        self.kv_caches = []  # the old pool goes before the new one comes
        self.kv_caches = self.backend.new_kv_cache(
            config.num_layers,
            num_blocks,
            block_size,
            config.num_kv_heads,
            config.head_dim,
            self.dtype,
            self.device,
        )

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, ``(source, destination)`` each, in every layer."""
        if pairs:
            with torch.inference_mode(), on_device(self.device):
                self.backend.copy_blocks(self.kv_caches, pairs)

    def read_blocks(self, blocks: Sequence[int]) -> UInt8:
        """Records of whole blocks, uint8 ``[n, block_size * kv_shape.token_bytes]``."""
        with torch.inference_mode(), on_device(self.device):
            records: UInt8 = self.backend.read_blocks(self.kv_caches, blocks)
        return records

    def write_blocks(self, blocks: Sequence[int], records: UInt8) -> None:
        """Put records into blocks; no block twice."""
        scatter = self.backend.scatter_blocks
        with torch.inference_mode(), on_device(self.device):
            if scatter is None:
                self.backend.write_blocks(self.kv_caches, blocks, records)
            else:
                scatter(self.kv_caches, blocks, self._copies.to_device(records))

    def start_reading(self, blocks: Sequence[int]) -> RecordCopy:
        """Start to copy records of whole blocks to the host, beside the steps."""
        assert self.backend.gather_blocks is not None
        with torch.inference_mode(), on_device(self.device):
            return self._copies.to_host(self.backend.gather_blocks(self.kv_caches, blocks))

    def give_back_memory(self) -> None:
        """Give memory that torch keeps for later back to the device, after it ran out."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def run(self, step: StepPlan, input_ids: Tensor | None = None) -> Tensor:
        """Compute the rows of a step.

        Args:
            step: its copies are done already; ids are below ``vocab_size`` and positions below
                ``max_model_len``.
            input_ids: int32 ``[T]`` on the device, in place of ``step.input_ids``: what the step
                before drew, where the host has not seen it yet. -1, of a bad draw, is any token.

        Returns:
            Logits ``[R, vocab_size]`` float32 of ``step.logits_rows``; with CUDA graphs they are
            valid until the next run.
        """
        assert self.kv_caches, "allocate_kv comes before run"
        with torch.inference_mode(), on_device(self.device):
            if self.graphs is not None:
                logits = self.graphs.run(step, input_ids)
                if logits is not None:
                    return logits
            return self._run(step, input_ids)

    def find_not_finite(self, step: StepPlan) -> list[str | None]:
        """Which part gives NaN or infinity first: `not_finite.find_not_finite` has the contract."""
        from .not_finite import find_not_finite

        return find_not_finite(self, step)

    def fetch(self, *tensors: Tensor) -> HostCopy:
        """Start to copy tensors to the host, in the order of the other calls."""
        with torch.inference_mode(), on_device(self.device):
            return HostCopy(*tensors)

    def _run(self, step: StepPlan, input_ids: Tensor | None) -> Tensor:
        # Everything that follows from the plan becomes tensors here, once for all layers.
        if len(step.positions):
            self._rotary.reserve(int(step.positions.max()) + 1)
        num_rows, num_logits = len(step.positions), len(step.logits_rows)
        every = num_logits == num_rows and bool((np.diff(step.logits_rows) > 0).all())
        return self.forward(
            self._put(step.input_ids) if input_ids is None else input_ids.clamp(min=0),
            self._put(step.positions),
            self._put(step.slot_mapping),
            self.backend.prepare_plan(step.attention, self.device),
            None if every else self._put(step.logits_rows),
        )

    def _put(self, array: np.ndarray[Any, Any]) -> Tensor:
        return to_device(torch.as_tensor(array), self.device)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        plan: Any,
        rows: Tensor | None,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """The layers and the head, reading nothing but these tensors, weights and KV.

        Args:
            ids: int32 or int64 ``[T]``.
            positions: int32 or int64 ``[T]``, within the reserved rotary table.
            slots: int64 ``[T]``, -1 where no KV is written.
            plan: what the backend's ``prepare_plan`` gave.
            rows: int32 or int64 ``[R]`` rows with logits; None: all, in order.
            out: float32 ``[R, vocab_size]``, where the logits go; made when missing.
        """
        backend, config = self.backend, self.config
        cos, sin = self._rotary.gather(positions)
        heads, kv_heads, size = config.num_q_heads, config.num_kv_heads, config.head_dim
        eps, num_rows, last = config.rms_norm_eps, len(ids), config.num_layers - 1
        num_logits = num_rows if rows is None else len(rows)
        hidden, residual = F.embedding(ids, self.weights.embed), None
        for index, layer in enumerate(self.weights.layers):
            if residual is None:
                residual, x = hidden, backend.rms_norm(hidden, layer.input_norm, eps)
            else:
                x, residual = backend.rms_norm(hidden, layer.input_norm, eps, residual)
            qkv = backend.linear(x, layer.qkv, layer.qkv_bias)
            qkv = qkv.view(num_rows, heads + 2 * kv_heads, size)
            q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
            k_cache, v_cache = self.kv_caches[index]
            q = backend.norm_rotary_write_kv(
                q, k, v, cos, sin, k_cache, v_cache, slots,
                q_weight=layer.q_norm, k_weight=layer.k_norm, eps=eps,
            )  # fmt: skip
            if index == last and not num_logits:
                break  # the keys and values are all that was wanted
            x = backend.tree_attention(q, k_cache, v_cache, plan, scale=self._scale)
            x = x.view(num_rows, heads * size)
            if index == last and rows is not None:  # from here on only these rows matter
                x, residual = x.index_select(0, rows), residual.index_select(0, rows)
            x = backend.linear(x, layer.o, layer.o_bias)
            x, residual = backend.rms_norm(x, layer.post_norm, eps, residual)
            x = backend.silu_and_mul(backend.linear(x, layer.gate_up, layer.gate_up_bias))
            hidden = backend.linear(x, layer.down, layer.down_bias)
        if not num_logits:
            return torch.empty((0, self.vocab_size), dtype=torch.float32, device=self.device)
        x, _ = backend.rms_norm(hidden, self.weights.norm, eps, residual)
        logits: Tensor = backend.linear(x, self.weights.head)
        return logits.float() if out is None else out.copy_(logits)
