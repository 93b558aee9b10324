"""A decode step of whole models of known shapes, random weights, beside the memory limit.

The limit is the time in which every weight that a step reads and every KV token pass once, at the
bandwidth that was measured in the same run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cotrt.bench.gpu_attention import Node
from cotrt.bench.gpu_timing import Timer, give_back
from cotrt.kernels.dispatch import choose
from cotrt.models.config import ModelConfig
from cotrt.models.decoder import Decoder, DecoderWeights, LayerWeights
from cotrt.plan import StepPlan
from cotrt.tree.attention.costs import PlanCosts
from cotrt.tree.attention.planner import AttentionPlanner, PlanLeaf

_ROPE = {"rope_theta": 500_000.0, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5}
MODELS: dict[str, dict[str, Any]] = {
    "Llama-3-8B": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, **_ROPE,
    },
    "Qwen2.5-7B": {
        "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584,
        "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, **_ROPE,
    },
}  # fmt: skip
TOY_MODELS: dict[str, dict[str, Any]] = {
    "toy": {
        "model_type": "llama", "vocab_size": 300, "hidden_size": 64, "intermediate_size": 64,
        "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 64,
        "num_key_value_heads": 1, **_ROPE,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """Rows of a step, and what each sees: a context of its own, or a prefix and a tail."""

    batches: tuple[int, ...]
    own: int
    prefix: int
    tail: int


FULL = Sizes((1, 16, 64, 256), own=512, prefix=2048, tail=64)
TOY = Sizes((1, 2), own=20, prefix=16, tail=8)


def random_decoder(raw: dict[str, Any], device: torch.device, dtype: torch.dtype) -> Decoder:
    """A decoder of a shape with small random weights, made on the device."""
    config = ModelConfig.from_dict({"architectures": None, **raw})
    generator = torch.Generator(device).manual_seed(0)

    def tensor(*shape: int) -> Tensor:
        made = torch.empty(shape, dtype=dtype, device=device)
        return made.normal_(std=0.02, generator=generator)

    def ones(size: int) -> Tensor:
        return torch.ones(size, dtype=dtype, device=device)

    hidden, inner = config.hidden_size, config.intermediate_size
    rows = config.q_size + 2 * config.kv_size
    layers = [
        LayerWeights(
            input_norm=ones(hidden),
            qkv=tensor(rows, hidden),
            qkv_bias=tensor(rows) if config.qkv_bias else None,
            q_norm=None,
            k_norm=None,
            o=tensor(hidden, config.q_size),
            o_bias=None,
            post_norm=ones(hidden),
            gate_up=tensor(2 * inner, hidden),
            gate_up_bias=None,
            down=tensor(hidden, inner),
            down_bias=None,
        )
        for _ in range(config.num_layers)
    ]
    weights = DecoderWeights(
        embed=tensor(config.vocab_size, hidden),
        layers=layers,
        norm=ones(hidden),
        head=tensor(config.vocab_size, hidden),
    )
    backend = choose(str(device), dtype, config.head_dim, 16, "triton")
    return Decoder(config, weights, backend)


def step_bytes(decoder: Decoder, tokens: int) -> int:
    """Bytes that a decode step reads at least: all weights but the embedding, and KV once."""
    weights = decoder.weights
    tensors = [weights.norm, weights.head]
    for layer in weights.layers:
        tensors += [t for t in (getattr(layer, n) for n in LayerWeights.__slots__) if t is not None]
    read = sum(t.numel() * t.element_size() for t in tensors)
    return read + tokens * decoder.kv_bytes_per_token


def decode_step(
    decoder: Decoder, batch: int, prefix: int, own: int, block_size: int
) -> tuple[StepPlan, int]:
    """A step of one row a sequence, each with `own` tokens after a shared prefix.

    Returns:
        The step, and how many KV tokens there are in all.
    """
    shared = Node(None, list(range(prefix // block_size)), 0, prefix)
    each = -(-own // block_size)
    leaves, slots = [], []
    for row in range(batch):
        first = len(shared.blocks) + row * each
        leaves.append(PlanLeaf(shared, list(range(first, first + each)), prefix + own, 1))
        slots.append((first + (own - 1) // block_size) * block_size + (own - 1) % block_size)
    planner = AttentionPlanner(block_size, PlanCosts(**decoder.plan_options))
    rows = np.arange(batch, dtype=np.int32)
    step = StepPlan(
        input_ids=rows % decoder.vocab_size,
        positions=np.full(batch, prefix + own - 1, np.int32),
        slot_mapping=np.array(slots, np.int64),
        copies=(),
        attention=planner.plan(leaves),
        logits_rows=rows,
        sample_rows=rows,
    )
    return step, prefix + batch * own


def run(timer: Timer, bandwidth: float, *, toy: bool) -> Iterator[dict[str, Any]]:
    """A record for each model, batch, and kind of context."""
    sizes, block_size = (TOY, 16) if toy else (FULL, 16)
    dtype = torch.float32 if toy else torch.bfloat16
    for name, raw in (TOY_MODELS if toy else MODELS).items():
        decoder = random_decoder(raw, timer.device, dtype)
        largest = max(sizes.batches)
        decoder.warm_up(
            max_num_seqs=largest, max_num_batched_tokens=max(2048, largest), block_size=block_size
        )
        if decoder.graphs is not None:
            decoder.graphs.buckets = list(sizes.batches)
        each = -(-max(sizes.own, sizes.tail) // block_size)
        decoder.allocate_kv(sizes.prefix // block_size + largest * each, block_size)
        for batch in sizes.batches:
            kinds = [("own", 0, sizes.own)]
            if batch > 1:
                kinds.append(("shared prefix", sizes.prefix, sizes.tail))
            for kind, prefix, own in kinds:
                step, tokens = decode_step(decoder, batch, prefix, own, block_size)
                record = _measure(decoder, step, timer)
                limit = step_bytes(decoder, tokens) / bandwidth * 1e3
                yield {
                    "model": name, "batch": batch, "context": kind, "kv_tokens": tokens,
                    **record, "limit_ms": limit, "of_limit": limit / record["step_ms"],
                }  # fmt: skip
        del decoder
        give_back(timer)


def _measure(decoder: Decoder, step: StepPlan, timer: Timer) -> dict[str, Any]:
    """Milliseconds of a step: alone on the device, one after another, and the host's part."""
    draws = {
        "temperature": np.full(len(step.positions), 0.8, np.float32),
        "top_k": np.zeros(len(step.positions), np.int32),
        "top_p": np.ones(len(step.positions), np.float32),
        "min_p": np.zeros(len(step.positions), np.float32),
    }
    keys = np.arange(len(step.positions), dtype=np.uint32)
    ids: Tensor | None = None

    def one() -> None:
        """As the engine does: the draws of a step are the next one's input."""
        nonlocal ids
        logits = decoder.run(step, ids)
        ids = decoder.sample(logits, step.sample_rows, *draws.values(), keys, keys)[0]

    count = 20 if timer.on_gpu else 1
    for _ in range(3 if timer.on_gpu else 1):
        one()
    replays = 0 if decoder.graphs is None else decoder.graphs.num_replays

    def many() -> None:
        for _ in range(count):
            one()

    seconds = timer.wall(many, repeats=5 if timer.on_gpu else 1) / count
    timer.synchronize()
    start = time.perf_counter()
    one()
    launched = time.perf_counter() - start
    timer.synchronize()
    graphed = decoder.graphs is not None and decoder.graphs.num_replays > replays
    return {"step_ms": seconds * 1e3, "launch_ms": launched * 1e3, "graph": graphed}
