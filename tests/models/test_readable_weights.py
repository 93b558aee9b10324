"""Weights of 8 bits are multiplied out by known rules; anything else is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import edit_config, make_model, save
from safetensors.torch import load_file, save_file

from cotrt.errors import ModelLoadError
from cotrt.models.config import ModelConfig
from cotrt.models.readable_weights import ReadableWeights
from cotrt.models.weights import check_tensors, open_weights

Edit = Callable[[dict[str, torch.Tensor]], None]
WEIGHT = "model.layers.1.mlp.gate_proj.weight"
STEM = WEIGHT.removesuffix("weight")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    wide = {"hidden_size": 192, "intermediate_size": 320}  # blocks of 128 that are not whole
    return save(make_model("llama", **wide), tmp_path_factory.mktemp("model"))


def edited(original: Path, folder: Path, edit: Edit) -> Path:
    for path in original.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def opened(folder: Path) -> ReadableWeights:
    config = ModelConfig.from_folder(folder)
    weights = ReadableWeights(open_weights(folder), config, "the model")
    check_tensors(weights, config, "the model")
    return weights


def per_tensor(values: torch.Tensor, most: float) -> tuple[torch.Tensor, torch.Tensor]:
    scale = values.abs().max().reshape(1) / most
    return scale, scale.expand_as(values)


def per_output(values: torch.Tensor, most: float) -> tuple[torch.Tensor, torch.Tensor]:
    scale = values.abs().amax(1, keepdim=True) / most
    return scale, scale.expand_as(values)


def per_block(values: torch.Tensor, most: float) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = (-(-size // 128) for size in values.shape)
    scale = torch.zeros(rows, columns)
    for i in range(rows):
        for j in range(columns):
            block = values[128 * i : 128 * i + 128, 128 * j : 128 * j + 128]
            scale[i, j] = block.abs().max() / most
    whole = torch.kron(scale, torch.ones(128, 128))
    return scale, whole[: values.shape[0], : values.shape[1]]


@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv", "scale_weight"])
@pytest.mark.parametrize("rule", [per_tensor, per_output, per_block])
@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_scales_are_used(
    kind: torch.dtype, rule: Any, name: str, original: Path, tmp_path: Path
) -> None:
    most = 127.0 if kind == torch.int8 else torch.finfo(kind).max

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        scale, whole = rule(tensors[WEIGHT], most)
        values = tensors[WEIGHT] / whole
        tensors[WEIGHT] = (values.round() if kind == torch.int8 else values).to(kind)
        tensors[STEM + name] = scale

    expected = load_file(original / "model.safetensors")[WEIGHT]
    weights = opened(edited(original, tmp_path, edit))
    found = weights.get(WEIGHT).float()
    step = 1 / 127 if kind == torch.int8 else 2.0 ** -(3 if kind == torch.float8_e4m3fn else 2)
    assert (found - expected).abs().max() <= step * expected.abs().max()
    assert STEM + name not in weights.names()
    assert weights.kind(WEIGHT) == "float32"
    weights.close()


def test_bitsandbytes_rows_are_in_127ths(original: Path, tmp_path: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        most = tensors[WEIGHT].abs().amax(1)
        tensors[WEIGHT] = (tensors[WEIGHT] / most[:, None] * 127).round().to(torch.int8)
        tensors[STEM + "SCB"] = most

    expected = load_file(original / "model.safetensors")[WEIGHT]
    found = opened(edited(original, tmp_path, edit)).get(WEIGHT)
    assert (found - expected).abs().max() <= expected.abs().max() / 127


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8])
def test_eight_bits_without_a_scale_are_refused(
    kind: torch.dtype, original: Path, tmp_path: Path
) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[WEIGHT] = tensors[WEIGHT].to(kind)

    kind_name = str(kind).removeprefix("torch.")
    with pytest.raises(ModelLoadError, match=rf"gate_proj.weight is stored as {kind_name}"):
        opened(edited(original, tmp_path, edit))


@pytest.mark.parametrize("shape", [(3,), (2, 2), (1, 192), (320, 2), (320, 192)])
def test_a_scale_whose_rule_is_not_known_is_refused(
    shape: tuple[int, ...], original: Path, tmp_path: Path
) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[WEIGHT] = tensors[WEIGHT].to(torch.int8)
        tensors[STEM + "weight_scale"] = torch.ones(shape)

    with pytest.raises(ModelLoadError, match=r"weight_scale \[.*the rule for that is not known"):
        opened(edited(original, tmp_path, edit))


def test_a_scale_beside_a_weight_of_16_bits_is_refused(original: Path, tmp_path: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[WEIGHT] = tensors[WEIGHT].bfloat16()
        tensors[STEM + "weight_scale"] = torch.ones(1)

    with pytest.raises(ModelLoadError, match="bfloat16.*weight_scale"):
        opened(edited(original, tmp_path, edit))


def test_two_scales_of_one_weight_are_refused(original: Path, tmp_path: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[WEIGHT] = tensors[WEIGHT].to(torch.int8)
        tensors |= {STEM + name: torch.ones(1) for name in ("weight_scale", "scale_weight")}

    with pytest.raises(ModelLoadError, match="two scales"):
        opened(edited(original, tmp_path, edit))


@pytest.mark.parametrize("kind", [torch.int32, torch.int64, torch.bool])
def test_weights_that_are_no_numbers_of_weights_are_refused(
    kind: torch.dtype, original: Path, tmp_path: Path
) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[WEIGHT] = tensors[WEIGHT].to(kind)

    with pytest.raises(ModelLoadError, match="no kind of weights"):
        opened(edited(original, tmp_path, edit))


def test_scales_of_activations_change_nothing(original: Path, tmp_path: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[STEM + "input_scale"] = torch.tensor(3.0)
        tensors["model.layers.0.self_attn.k_scale"] = torch.tensor(0.5)

    weights = opened(edited(original, tmp_path, edit))
    assert torch.equal(weights.get(WEIGHT), load_file(original / "model.safetensors")[WEIGHT])


def test_a_tied_matrix_under_the_heads_name_is_the_embedding(
    original: Path, tmp_path: Path
) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.embed_tokens.weight"]

    expected = load_file(original / "model.safetensors")["lm_head.weight"]
    folder = edited(original, tmp_path, edit)
    with pytest.raises(ModelLoadError, match=r"missing tensors: model.embed_tokens"):
        opened(folder)
    edit_config(folder, tie_word_embeddings=True)
    assert torch.equal(opened(folder).get("model.embed_tokens.weight"), expected)


@pytest.mark.parametrize("block", [None, [128, 128]])
def test_a_config_that_says_so_too_is_accepted(
    block: list[int] | None, original: Path, tmp_path: Path
) -> None:
    folder = edited(original, tmp_path, lambda tensors: None)
    edit_config(folder, quantization_config={"quant_method": "fp8", "weight_block_size": block})
    opened(folder)
    edit_config(folder, quantization_config={"quant_method": "fp8", "weight_block_size": [64, 64]})
    with pytest.raises(ModelLoadError, match="quantised .fp8."):
        opened(folder)
