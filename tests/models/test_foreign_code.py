"""Code that comes with a model never runs, whichever file names it and whatever reads that file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkpoints import make_model, save
from foreign_code import KNOWN, UNKNOWN, add_code, never_ran
from tokens import byte_tokenizer

from cotrt.errors import ModelLoadError
from cotrt.models import load


def gpt2_files(folder: Path) -> None:
    """The tokenizer of `folder` as only transformers reads it."""
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n")


def test_a_folder_with_a_tokenizer_json(tmp_path: Path) -> None:
    byte_tokenizer(save(make_model("llama", vocab_size=300), tmp_path))
    mark = add_code(tmp_path)
    loaded = load(tmp_path)
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("ab")) == "ab"
    assert never_ran(mark)


def test_a_folder_that_transformers_reads(tmp_path: Path) -> None:
    """There is a class of transformers' own, and it is taken."""
    gpt2_files(byte_tokenizer(save(make_model("llama", vocab_size=300), tmp_path)))
    mark = add_code(tmp_path, **KNOWN)
    loaded = load(tmp_path)
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("ab")) == "ab"
    assert never_ran(mark)


def test_a_tokenizer_that_is_code_alone_is_refused(tmp_path: Path) -> None:
    model, tokenizer = tmp_path / "model", tmp_path / "tokenizer"
    for path in (model, tokenizer):
        path.mkdir()
    save(make_model("llama", vocab_size=300), model)
    gpt2_files(byte_tokenizer(tokenizer))
    mark = add_code(tokenizer, **UNKNOWN)
    with pytest.raises(ModelLoadError, match="the tokenizer in .* cannot be read"):
        load(model, tokenizer=tokenizer)
    assert never_ran(mark)
