"""Checkpoints that are whole load to the bit; others are refused by the name of what is wrong."""

from __future__ import annotations

import json
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_model, open_decoder, prompt_logits, random_ids, save
from safetensors.torch import load_file, save_file

from cotrt.errors import ModelLoadError
from cotrt.models import load
from cotrt.models.config import ModelConfig
from cotrt.models.decoder import DecoderWeights
from cotrt.models.weights import INDEX_NAME, open_weights

Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("llama", seed=5), tmp_path_factory.mktemp("original"))


@pytest.fixture
def single(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "single"))


@pytest.fixture
def sharded(original: Path, tmp_path: Path) -> Path:
    """Three shards and an index."""
    folder = tmp_path / "sharded"
    folder.mkdir()
    shutil.copy(original / "config.json", folder)
    tensors = load_file(original / "model.safetensors")
    names = sorted(tensors)
    weight_map = {}
    for i in range(3):
        file = f"model-0000{i + 1}-of-00003.safetensors"
        part = {name: tensors[name] for name in names[i::3]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def shard_of(folder: Path, name: str) -> Path:
    return folder / json.loads((folder / INDEX_NAME).read_text())["weight_map"][name]


def edit_tensors(path: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(path)
    for name, value in changes.items():
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value
    save_file(tensors, path, metadata={"format": "pt"})


def logits(folder: Path) -> torch.Tensor:
    return prompt_logits(load(folder, attention_backend="reference").model, [random_ids(30)])[0]


def assert_same(folder: Path, original: Path) -> None:
    assert torch.equal(logits(folder), logits(original))


def test_shards_load_as_the_single_file_does(sharded: Path, original: Path) -> None:
    assert_same(sharded, original)


def test_merged_weights_hold_the_checkpoint_to_the_bit(original: Path) -> None:
    tensors = load_file(original / "model.safetensors")
    weights = open_decoder(original).weights
    parts = [tensors[f"model.layers.1.self_attn.{p}_proj.weight"] for p in "qkv"]
    assert torch.equal(weights.layers[1].qkv, torch.cat(parts))
    parts = [tensors[f"model.layers.0.mlp.{p}_proj.weight"] for p in ("gate", "up")]
    assert torch.equal(weights.layers[0].gate_up, torch.cat(parts))
    assert torch.equal(weights.head, tensors["lm_head.weight"])


def test_weights_own_their_memory_and_are_aligned_for_vector_loads(original: Path) -> None:
    weights = open_decoder(original).weights
    for layer in weights.layers:
        for tensor in (layer.qkv, layer.o, layer.gate_up, layer.down, layer.input_norm):
            assert tensor.is_contiguous()
            assert tensor.data_ptr() % 64 == 0


def test_nothing_is_held_twice_while_loading(original: Path) -> None:
    """Each tensor is read when its place in the merged weights is there, then let go."""
    source = open_weights(original)
    held: list[Any] = []

    class Watched:
        def __getattr__(self, name: str) -> Any:
            return getattr(source, name)

        def get(self, name: str) -> torch.Tensor:
            assert not [ref for ref in held if ref() is not None], "an earlier tensor is held"
            tensor = source.get(name)
            held.append(weakref.ref(tensor))
            return tensor

    config = ModelConfig.from_folder(original)
    DecoderWeights.from_source(Watched(), config, torch.float32, "cpu")
    assert len(held) == len(source.names())


def test_a_tied_head_is_the_embedding_itself(tmp_path: Path) -> None:
    weights = open_decoder(save(make_model("llama", tie_word_embeddings=True), tmp_path)).weights
    assert weights.head is weights.embed


def test_a_missing_shard_is_named(sharded: Path) -> None:
    path = shard_of(sharded, Q)
    path.unlink()
    with pytest.raises(ModelLoadError, match=rf"lacks shards.*{path.name}.*did not end"):
        load(sharded)


def test_a_shard_that_is_cut_short_is_named(sharded: Path) -> None:
    path = shard_of(sharded, Q)
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ModelLoadError, match=rf"{path.name} is not a whole safetensors file"):
        load(sharded)


def test_a_shard_of_nothing_is_named(sharded: Path) -> None:
    shard_of(sharded, Q).write_bytes(b"")
    with pytest.raises(ModelLoadError, match="not a whole safetensors file"):
        load(sharded)


def test_a_renamed_tensor_is_named_as_missing_and_its_new_name_as_surplus(single: Path) -> None:
    path = single / "model.safetensors"
    value = load_file(path)[Q]
    edit_tensors(path, **{Q: None, "model.layers.1.self_attn.query.weight": value})
    with pytest.raises(ModelLoadError, match=rf"missing tensors: {Q}") as caught:
        load(single)
    assert "not the model's: model.layers.1.self_attn.query.weight" in str(caught.value)


def test_a_tensor_that_the_index_places_in_a_file_without_it_is_named(sharded: Path) -> None:
    edit_tensors(shard_of(sharded, Q), **{Q: None})
    with pytest.raises(ModelLoadError, match=rf"lacks tensors that the index places in it: {Q}"):
        load(sharded)


def test_a_misshapen_tensor_is_named_with_both_shapes(single: Path) -> None:
    edit_tensors(single / "model.safetensors", **{Q: torch.zeros(64, 32)})
    with pytest.raises(ModelLoadError, match=rf"{Q} \[64, 32\], should be \[64, 64\]"):
        load(single)


def test_a_config_of_another_size_is_refused(single: Path) -> None:
    config = json.loads((single / "config.json").read_text())
    (single / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(ModelLoadError, match=r"missing tensors: model\.layers\.2\."):
        load(single)


def test_stray_files_with_other_values_are_ignored_with_a_warning(
    sharded: Path, original: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = {k: torch.zeros_like(v) for k, v in load_file(original / "model.safetensors").items()}
    save_file(wrong, sharded / "model.safetensors")
    save_file(wrong, sharded / "consolidated.safetensors")
    assert_same(sharded, original)
    assert "ignored files" in caplog.text
    assert "consolidated.safetensors, model.safetensors" in caplog.text


def test_the_index_decides_where_two_files_have_a_tensor(sharded: Path, original: Path) -> None:
    mine = shard_of(sharded, Q)
    other = next(p for p in sharded.glob("*.safetensors") if p != mine)
    edit_tensors(other, **{Q: torch.zeros(64, 64)})
    assert_same(sharded, original)


def test_a_surplus_tensor_is_ignored_with_its_name(
    single: Path, original: Path, caplog: pytest.LogCaptureFixture
) -> None:
    extra = {"model.extra.weight": torch.ones(3), "model.rotary_emb.inv_freq": torch.ones(8)}
    edit_tensors(single / "model.safetensors", **extra)
    assert_same(single, original)
    assert "model.extra.weight" in caplog.text
    assert "inv_freq" not in caplog.text


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.q_proj.bias", "model.layers.1.self_attn.q_norm.weight"]
)
def test_tensors_that_contradict_the_config_are_refused(name: str, single: Path) -> None:
    edit_tensors(single / "model.safetensors", **{name: torch.ones(64)})
    with pytest.raises(ModelLoadError, match="that config.json says are not there"):
        load(single)


def test_a_config_of_fewer_layers_is_refused_with_both_numbers(single: Path) -> None:
    config = json.loads((single / "config.json").read_text())
    num_layers = config["num_hidden_layers"]
    config["num_hidden_layers"] = 1
    (single / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=f"{num_layers} layers, where config.json says 1"):
        load(single)


def test_a_surplus_head_beside_a_tied_embedding_is_ignored_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(make_model("llama", tie_word_embeddings=True), tmp_path)
    before = logits(tmp_path)
    edit_tensors(tmp_path / "model.safetensors", **{"lm_head.weight": torch.ones(203, 64)})
    assert torch.equal(logits(tmp_path), before)
    assert "lm_head.weight ignored" in caplog.text


def test_an_untied_head_that_is_missing_is_named(single: Path) -> None:
    edit_tensors(single / "model.safetensors", **{"lm_head.weight": None})
    with pytest.raises(ModelLoadError, match=r"missing tensors: lm_head.weight"):
        load(single)


def test_links_into_a_cache_are_followed(sharded: Path, original: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in sharded.iterdir():
        (snapshot / path.name).symlink_to(path)
    assert_same(snapshot, original)


def test_a_checkpoint_saved_without_its_head_has_names_without_the_prefix(tmp_path: Path) -> None:
    model = make_model("llama", tie_word_embeddings=True)
    whole, bare = save(model, tmp_path / "whole"), tmp_path / "bare"
    model.model.save_pretrained(bare)
    assert "embed_tokens.weight" in load_file(bare / "model.safetensors")
    assert_same(bare, whole)


def test_pickled_weights_are_refused_with_the_remedy_and_never_opened(
    single: Path, tmp_path: Path
) -> None:
    (single / "model.safetensors").unlink()
    mark = tmp_path / "ran"

    class Trap:
        def __reduce__(self) -> Any:
            return (Path.touch, (mark,))

    torch.save({"x": Trap()}, single / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=r"pickled weights only .*safe_serialization=True"):
        load(single)
    assert not mark.exists()


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/model.safetensors", 7])
def test_an_index_that_points_outside_its_folder_is_refused(name: Any, sharded: Path) -> None:
    index = json.loads((sharded / INDEX_NAME).read_text())
    index["weight_map"][Q] = name
    (sharded / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match="which is no file name"):
        load(sharded)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"weight_map": {}}'])
def test_an_index_that_is_none_is_refused(text: str, sharded: Path) -> None:
    (sharded / INDEX_NAME).write_text(text)
    with pytest.raises(ModelLoadError, match="index.json"):
        load(sharded)


def test_shards_without_an_index_are_refused(sharded: Path) -> None:
    (sharded / INDEX_NAME).unlink()
    with pytest.raises(ModelLoadError, match="3 safetensors files but no"):
        load(sharded)


def test_a_folder_without_weights_or_config_says_so(single: Path) -> None:
    (single / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="no safetensors"):
        load(single)
    (single / "config.json").unlink()
    with pytest.raises(ModelLoadError, match=r"has no config.json"):
        load(single)


def test_the_fingerprint_tells_weights_and_configs_apart(
    single: Path, sharded: Path, original: Path
) -> None:
    mark = load(original).fingerprint
    assert load(sharded).fingerprint == mark
    assert load(single, dtype="bfloat16").fingerprint == mark
    edit_tensors(
        single / "model.safetensors", **{Q: load_file(single / "model.safetensors")[Q] + 1}
    )
    assert load(single).fingerprint != mark
