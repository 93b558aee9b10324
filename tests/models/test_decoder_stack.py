"""The whole stack in one call against the reference Decoder, by family and dtype."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from attention_oracle import build_plan

from cotrt.errors import InvalidRequestError
from cotrt.kernels.cpu.native import isa, missing_reason, set_num_threads
from cotrt.kernels.dispatch import choose
from cotrt.models.config import ModelConfig
from cotrt.models.decoder import Decoder, DecoderWeights
from cotrt.models.decoder_stack import CpuDecoder, refusal
from cotrt.models.rope import RotaryTable
from cotrt.models.weights import tensor_table
from cotrt.plan import AttentionPlan, StepPlan

pytestmark = pytest.mark.skipif(missing_reason() is not None, reason=str(missing_reason()))

BASE = {
    "vocab_size": 333,
    "hidden_size": 128,
    "intermediate_size": 208,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama, tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama with all biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "qwen2": {"model_type": "qwen2"},
    "qwen3, wide heads": {"model_type": "qwen3", "head_dim": 32},
}


class Weights:
    """Random tensors by name."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        outer, layers = tensor_table(config)
        specs = [*outer, *(spec for layer in layers for spec in layer.values())]
        generator = torch.Generator().manual_seed(0)
        self.tensors = {}
        for spec in specs:
            tensor = torch.randn(spec.shape, generator=generator)
            if "norm" in spec.name:
                tensor = 1 + 0.1 * tensor
            elif "bias" not in spec.name:
                tensor /= spec.shape[-1] ** 0.5
            self.tensors[spec.name] = tensor.to(dtype)

    def names(self) -> list[str]:
        return list(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def get(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def close(self) -> None:
        pass


def native(config: ModelConfig, source: Weights, dtype: torch.dtype, **options: Any) -> CpuDecoder:
    rotary = RotaryTable(config.rope, "cpu")
    return CpuDecoder(config, source, tensor_table(config), rotary, dtype=dtype, **options)


def reference(config: ModelConfig, source: Weights, dtype: torch.dtype) -> Decoder:
    weights = DecoderWeights.from_source(source, config, dtype, "cpu")
    return Decoder(config, weights, choose("cpu", dtype, config.head_dim, 16, "reference"))


def step(
    plan: AttentionPlan, ids: np.ndarray, slots: list[int], logits_rows: list[int]
) -> StepPlan:
    return StepPlan(
        input_ids=ids.astype(np.int32),
        positions=plan.query_positions,
        slot_mapping=np.array(slots, np.int64),
        copies=(),
        attention=plan,
        logits_rows=np.array(logits_rows, np.int32),
        sample_rows=np.arange(len(logits_rows), dtype=np.int32),
    )


def steps(block_size: int) -> tuple[list[StepPlan], int]:
    """A prompt of 64 tokens, five branches of 7 forced tokens over it, and one more token each."""
    draw = np.random.default_rng(0)
    shared = list(range(64 // block_size))
    prompt, _ = build_plan(block_size, list(range(64)), [(0, 64, True, list(range(64)))])
    prompt = replace(prompt, group_blocks=np.array(shared, np.int32))
    first = step(prompt, draw.integers(0, 333, 64), list(range(64)), [3, 63])
    made, tails = [first], [len(shared) + i for i in range(5)]
    for start, count in ((0, 7), (7, 1)):
        num_rows = 5 * count
        positions = [64 + start + i for _ in range(5) for i in range(count)]
        groups = [(0, 64, False, list(range(num_rows)))]
        for i in range(5):
            groups.append((64, start + count, True, list(range(i * count, (i + 1) * count))))
        plan, _ = build_plan(block_size, positions, groups)
        plan = replace(plan, group_blocks=np.array([*shared, *tails], np.int32))
        slots = [tail * block_size + start + i for tail in tails for i in range(count)]
        last = [(i + 1) * count - 1 for i in range(5)]
        made.append(step(plan, draw.integers(0, 333, num_rows), slots, last))
    return made, len(shared) + 5


def run(model: Any, block_size: int = 16) -> list[torch.Tensor]:
    made, num_blocks = steps(block_size)
    model.allocate_kv(num_blocks, block_size)
    return [model.run(one) for one in made]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("block_size", [8, 32])
def test_float32_equals_the_reference(family: str, block_size: int) -> None:
    config = ModelConfig.from_dict({**BASE, **FAMILIES[family]})
    source = Weights(config, torch.float32)
    found = run(native(config, source, torch.float32), block_size)
    expected = run(reference(config, source, torch.float32), block_size)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == torch.float32 and a.shape == b.shape
        assert (a - b).abs().max() < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_error_in_bfloat16_is_at_most_that_of_torch(family: str) -> None:
    config = ModelConfig.from_dict({**BASE, **FAMILIES[family]})
    source = Weights(config, torch.bfloat16)
    exact = torch.cat(run(reference(config, source, torch.float32)))
    ours = (torch.cat(run(native(config, source, torch.bfloat16))) - exact).square().mean().sqrt()
    theirs = torch.cat(run(reference(config, source, torch.bfloat16))) - exact
    assert ours <= 1.2 * theirs.square().mean().sqrt()


def test_float16_is_computed_in_float32() -> None:
    config = ModelConfig.from_dict({**BASE, **FAMILIES["llama, tied"]})
    source = Weights(config, torch.float16)
    model = native(config, source, torch.float16)
    exact = torch.cat(run(reference(config, source, torch.float32)))
    assert (torch.cat(run(model)) - exact).abs().max() < 1e-4
    assert model.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4


def test_int8_weights_change_little() -> None:
    config = ModelConfig.from_dict({**BASE, **FAMILIES["qwen2"]})
    source = Weights(config, torch.bfloat16)
    exact = torch.cat(run(reference(config, source, torch.float32)))
    model = native(config, source, torch.bfloat16, quantization="int8")
    found = torch.cat(run(model))
    assert (found - exact).square().mean() < 1e-3 * exact.square().mean()
    assert model.weight_bytes < 0.7 * native(config, source, torch.bfloat16).weight_bytes


def test_tied_embedding_is_one_copy() -> None:
    tied = ModelConfig.from_dict({**BASE, **FAMILIES["llama, tied"]})
    untied = ModelConfig.from_dict({**BASE, "model_type": "llama"})
    a = native(tied, Weights(tied, torch.bfloat16), torch.bfloat16)
    b = native(untied, Weights(untied, torch.bfloat16), torch.bfloat16)
    assert b.weight_bytes - a.weight_bytes >= 333 * 128 * 2


def test_copied_blocks_serve_like_their_sources() -> None:
    config = ModelConfig.from_dict({**BASE, **FAMILIES["qwen2"]})
    model = native(config, Weights(config, torch.bfloat16), torch.bfloat16)
    made, num_blocks = steps(16)
    model.allocate_kv(num_blocks + 9, 16)
    for one in made[:2]:
        model.run(one)
    moved = [(block, block + 9) for block in range(9)]
    model.copy_blocks(moved)
    last = made[2]
    expected = model.run(last)
    elsewhere = replace(last.attention, group_blocks=last.attention.group_blocks + np.int32(9))
    found = model.run(replace(last, attention=elsewhere, slot_mapping=last.slot_mapping + 9 * 16))
    assert torch.equal(found, expected)


def test_a_step_without_logits_writes_its_kv() -> None:
    config = ModelConfig.from_dict({**BASE, **FAMILIES["qwen2"]})
    model = native(config, Weights(config, torch.float32), torch.float32)
    made, _ = steps(16)
    expected = run(model)
    model.allocate_kv(9, 16)
    empty = np.empty(0, np.int32)
    for one in made[:2]:
        assert model.run(replace(one, logits_rows=empty, sample_rows=empty)).shape == (0, 333)
    assert torch.equal(model.run(made[2]), expected[2])


def test_rows_whose_kv_is_there_are_computed_for_their_logits_alone() -> None:
    config = ModelConfig.from_dict({**BASE, **FAMILIES["qwen2"]})
    model = native(config, Weights(config, torch.float32), torch.float32)
    expected = run(model)[2]
    last = steps(16)[0][2]
    again = model.run(replace(last, slot_mapping=np.full(5, -1, np.int64)))
    assert torch.equal(again, expected)


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_prompt_in_one_step_has_the_bits_of_short_steps(
    threads: int, quantization: str | None
) -> None:
    """Of a long step, a thread may take many rows through several linears at once."""
    config = ModelConfig.from_dict({**BASE, **FAMILIES["qwen2"], "max_position_embeddings": 1024})
    length = 310 * threads
    ids = np.random.default_rng(0).integers(0, 333, length)
    found, models = [], []
    set_num_threads(threads)
    try:
        for size in (length, 62):
            model = native(
                config, Weights(config, torch.bfloat16), torch.bfloat16,
                quantization=quantization, deterministic=True,
            )  # fmt: skip
            model.allocate_kv(-(-length // 16), 16)
            for end in range(size, length + 1, size):
                positions = list(range(end - size, end))
                plan, _ = build_plan(16, positions, [(0, end, True, list(range(size)))])
                blocks = np.arange(-(-end // 16), dtype=np.int32)
                plan = replace(plan, group_blocks=blocks, chunk_tokens=256)
                logits = model.run(step(plan, ids[end - size : end], positions, [size - 1]))
            found.append(logits)
            models.append(model)
    finally:
        set_num_threads(None)
    assert torch.equal(*found)
    for one, other in zip(models[0].kv_caches, models[1].kv_caches, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])
    took_blocks = [model.timings()["row_blocks"] > 0 for model in models]
    assert took_blocks == [isa() in ("amx", "amx_emulated"), False]


def test_misfits_are_named() -> None:
    config = ModelConfig.from_dict({**BASE, **FAMILIES["qwen2"], "intermediate_size": 200})
    assert "intermediate_size 200" in str(refusal(config))
    config = ModelConfig.from_dict({**BASE, **FAMILIES["qwen2"]})
    assert refusal(config) is None
    with pytest.raises(InvalidRequestError, match="quantization 'int4'"):
        native(config, Weights(config, torch.bfloat16), torch.bfloat16, quantization="int4")
    model = native(config, Weights(config, torch.float32), torch.float32)
    made, num_blocks = steps(16)
    model.allocate_kv(num_blocks, 16)
    bad = made[0].input_ids.copy()
    bad[5] = 333
    with pytest.raises(ValueError, match="outside the vocabulary"):
        model.run(replace(made[0], input_ids=bad))
    slots = made[0].slot_mapping.copy()
    slots[0] = num_blocks * 16
    with pytest.raises(ValueError, match="slot outside"):
        model.run(replace(made[0], slot_mapping=slots))


def test_an_interrupted_stack_breaks_its_steps_off() -> None:
    config = ModelConfig.from_dict({**BASE, **FAMILIES["qwen2"]}, "interrupted")
    model = native(config, Weights(config, torch.float32), torch.float32)
    plans, blocks = steps(16)
    model.allocate_kv(blocks, 16)
    model.run(plans[0])
    model.interrupt()
    with pytest.raises(RuntimeError, match="broken off"):
        model.run(plans[0])
