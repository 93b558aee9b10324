"""What load() makes of arguments, EOS settings and sampling defaults."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_model, save
from tokens import byte_tokenizer

from cotrt.errors import InvalidRequestError, ModelLoadError
from cotrt.models import load


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("llama", vocab_size=300), tmp_path_factory.mktemp("model"))


def with_eos(folder: Path, tmp_path: Path, **places: Any) -> Path:
    """The model with EOS named in given places only."""
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("eos_token_id", None)
    if "config" in places:
        config["eos_token_id"] = places["config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    if "generation" in places:
        text = json.dumps({"eos_token_id": places["generation"]})
        (tmp_path / "generation_config.json").write_text(text)
    byte_tokenizer(tmp_path, eos_token=places.get("tokenizer"))
    return tmp_path


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ({"generation": [2, 7]}, {2, 7}),
        ({"generation": 7}, {7}),
        ({"config": 7}, {7}),
        ({"config": [5, 7]}, {5, 7}),
        ({"tokenizer": "<|end|>"}, {257}),
        ({"generation": [2, 7], "tokenizer": "<|end|>"}, {2, 7, 257}),
        ({"generation": 4, "config": 5, "tokenizer": "<|end|>"}, {4, 5, 257}),
        ({}, set()),
        ({"generation": None, "config": None}, set()),
        ({"generation": [2, 999]}, {2}),
    ],
)
def test_every_declared_eos_counts_wherever_it_is_declared(
    places: dict[str, Any], expected: set[int], folder: Path, tmp_path: Path
) -> None:
    loaded = load(with_eos(folder, tmp_path, **places))
    assert loaded.eos_token_ids == frozenset(expected)


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({}, {}),
        ({"temperature": 0.6, "top_p": 0.9, "top_k": 20}, None),
        ({"do_sample": True, "temperature": 0.6, "repetition_penalty": 1.1}, None),
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"do_sample": False, "temperature": 0.6, "top_k": 5}, {"temperature": 0.0, "top_k": 5}),
        ({"temperature": None, "max_length": 30}, {}),
    ],
)
def test_sampling_defaults_are_those_that_generation_config_sets(
    generation: dict[str, Any], expected: dict[str, Any] | None, folder: Path, tmp_path: Path
) -> None:
    with_eos(folder, tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    if expected is None:
        expected = {k: v for k, v in generation.items() if k != "do_sample"}
    assert load(tmp_path).generation_defaults == expected


def test_a_model_without_a_tokenizer_has_none(folder: Path) -> None:
    assert load(folder).tokenizer is None


def test_a_tokenizer_given_as_object_or_folder_is_used(folder: Path, tmp_path: Path) -> None:
    class Characters:
        eos_token_id = 3

        def encode(self, text: str) -> list[int]:
            return [ord(c) for c in text]

        def decode(self, ids: list[int]) -> str:
            return "".join(map(chr, ids))

    loaded = load(folder, tokenizer=Characters())
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.encode("ab") == [97, 98]
    assert 3 in loaded.eos_token_ids
    byte_tokenizer(tmp_path)
    from_folder = load(folder, tokenizer=tmp_path).tokenizer
    assert from_folder is not None
    assert from_folder.decode(from_folder.encode("héllo")) == "héllo"
    with pytest.raises(ModelLoadError, match="has no tokenizer files"):
        load(folder, tokenizer=folder)
    with pytest.raises(InvalidRequestError, match=r"has no encode\(\)"):
        load(folder, tokenizer=object())


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"trust_remote_code": True}, "code of a model never runs"),
        ({"quantization": "awq"}, "not in this version"),
        ({"quantization": "int8", "attention_backend": "reference"}, "needs the native CPU"),
        ({"dtype": "float8"}, "dtype 'float8' is unknown"),
        ({"attention_backend": "magic"}, "attention_backend 'magic' is unknown"),
        ({"max_model_len": 0}, "positive integer"),
    ],
)
def test_arguments_that_are_not_allowed_are_refused(
    arguments: dict[str, Any], word: str, folder: Path
) -> None:
    with pytest.raises(InvalidRequestError, match=word):
        load(folder, **arguments)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_auto_dtype_is_that_of_the_checkpoint(dtype: str, tmp_path: Path) -> None:
    kind = getattr(torch, dtype)
    for edits in ({}, {"dtype": None, "torch_dtype": dtype}, {"dtype": None}):
        save(make_model("llama").to(kind), tmp_path, **edits)
        assert load(tmp_path, attention_backend="reference").model.dtype == kind


def test_importing_models_brings_no_torch_and_no_transformers() -> None:
    code = "import sys, cotrt.models; print(sorted({'torch', 'transformers'} & {*sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_loading_a_folder_brings_no_transformers(folder: Path, tmp_path: Path) -> None:
    """transformers takes seconds to import, and a folder with a tokenizer.json needs none of it."""
    with_eos(folder, tmp_path)
    code = (
        "import sys, cotrt.models; cotrt.models.load(sys.argv[1]);"
        "print('transformers' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"top_p": 1.5}, r"top_p: must be in \(0, 1\], not 1.5"),
        ({"temperature": "hot"}, "temperature: must be a number, not str 'hot'"),
    ],
)
def test_a_bad_sampling_default_names_file_and_field_before_weights_are_read(
    bad: dict[str, Any], words: str, tmp_path: Path
) -> None:
    save(make_model("llama"), tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(bad))
    assert load(tmp_path, generation_config="vllm").generation_defaults == {}
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=rf"generation_config\.json: {words}.*\"vllm\""):
        load(tmp_path)
