"""Every byte of a model's weights decides its fingerprint, and is read for it once."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_model, save
from safetensors.torch import load_file, save_file
from tokens import byte_tokenizer

from cotrt import LLM, ModelLoadError, SamplingParams, SavedBranchError
from cotrt.models.content_hash import kept_hash


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COTRT_HOME", str(tmp_path / "home"))


class Reader:
    """A file whose hash is wanted, and how often it was made."""

    def __init__(self, path: Path) -> None:
        self.path, self.reads = path, 0
        path.write_bytes(b"x" * 100)

    def hash(self, path: Path | None = None, kind: str = "sha256") -> bytes:
        def make() -> bytes:
            self.reads += 1
            return hashlib.sha256(self.path.read_bytes()).digest()

        return kept_hash(kind, [path or self.path], make)


@pytest.fixture
def file(tmp_path: Path) -> Reader:
    return Reader(tmp_path / "weights")


def note_of(tmp_path: Path) -> Path:
    (note,) = (tmp_path / "home" / "hashes").iterdir()
    return note


def test_a_file_is_read_once_under_any_name(tmp_path: Path, file: Reader) -> None:
    (tmp_path / "link").symlink_to(file.path)
    assert file.hash() == file.hash() == file.hash(tmp_path / "link")
    assert file.reads == 1


def test_a_file_written_to_in_place_is_read_again_whatever_its_times_say(file: Reader) -> None:
    before, stat = file.hash(), file.path.stat()
    with open(file.path, "r+b") as writer:
        writer.write(b"y")
    os.utime(file.path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert file.hash() != before
    assert file.reads == 2


def test_a_file_that_took_anothers_place_is_read_again(tmp_path: Path, file: Reader) -> None:
    before, stat = file.hash(), file.path.stat()
    (tmp_path / "new").write_bytes(b"z" * 100)
    os.utime(tmp_path / "new", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    os.replace(tmp_path / "new", file.path)
    assert file.hash() != before


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"hash": 3}', '{"hash": "zz"}', "\xff\x00"])
def test_a_damaged_note_is_made_again(tmp_path: Path, file: Reader, text: str) -> None:
    before, note = file.hash(), note_of(tmp_path)
    whole = note.read_bytes()
    note.write_text(text)
    assert file.hash() == before
    assert note.read_bytes() == whole
    assert file.reads == 2


def test_a_note_of_another_kind_of_hash_is_not_used(file: Reader) -> None:
    file.hash()
    file.hash(kind="crc32")
    assert file.reads == 2


def test_a_home_that_cannot_be_written_costs_time_only(
    tmp_path: Path, file: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("COTRT_HOME", str(tmp_path / "file" / "home"))
    assert file.hash() == file.hash()
    assert file.reads == 2


def test_a_file_that_changes_meanwhile_is_refused(file: Reader) -> None:
    def make() -> bytes:
        file.path.write_bytes(b"y" * 100)
        return b"0" * 32

    with pytest.raises(ModelLoadError, match="written to while it was read"):
        kept_hash("sha256", [file.path], make)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="nowhere"):
        kept_hash("sha256", [tmp_path / "nowhere"], lambda: b"")


PROMPT = list(range(3, 51))  # three blocks


def opened(folder: Path, cache: Path, **options: Any) -> LLM:
    return LLM(str(folder), prefix_cache_dir=str(cache), kv_cache_memory_bytes=8 << 20, **options)


def cached_tokens(llm: LLM) -> int:
    params = SamplingParams(max_tokens=1, temperature=0)
    return llm.generate([PROMPT], params, use_tqdm=False)[0].num_cached_tokens


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.bfloat16, {}),
        (torch.float32, {}),
        (torch.float16, {}),
        (torch.bfloat16, {"quantization": "int8"}),
    ],
)
def test_models_that_differ_in_one_bit_share_nothing(
    dtype: torch.dtype, options: dict[str, Any], tmp_path: Path
) -> None:
    folder, cache, saved = tmp_path / "model", tmp_path / "cache", tmp_path / "branch.safetensors"
    save(make_model("llama", vocab_size=300).to(dtype), folder)
    byte_tokenizer(folder)
    with opened(folder, cache, **options) as llm:
        assert cached_tokens(llm) == 0
        branch = llm.branch(PROMPT)
        branch.generate(max_tokens=1).result()
        branch.save(saved)
    with opened(folder, cache, **options) as llm:
        assert cached_tokens(llm) > 0
        assert len(llm.load_branch(saved)) == len(PROMPT) + 1

    path = folder / "model.safetensors"
    tensors = load_file(path)
    raw = tensors["model.layers.1.mlp.down_proj.weight"].flatten().view(torch.uint8)
    raw[1337] ^= 1
    save_file(tensors, path, metadata={"format": "pt"})
    with opened(folder, cache, **options) as llm:
        assert cached_tokens(llm) == 0
        with pytest.raises(SavedBranchError, match="another model"):
            llm.load_branch(saved)
        assert llm.load_branch(saved, kv="recompute").token_ids[: len(PROMPT)] == PROMPT


def test_a_branch_saved_under_an_older_fingerprint_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, saved = tmp_path / "model", tmp_path / "branch.safetensors"
    save(make_model("llama", vocab_size=300), folder)
    byte_tokenizer(folder)
    with opened(folder, tmp_path / "cache") as llm:
        model = llm._runtime.engine.model
        assert model.fingerprint.startswith("full-")
        monkeypatch.setattr(model, "fingerprint", "0" * 32 + "-float32-none")
        llm.branch(PROMPT).save(saved)
        monkeypatch.undo()
    with opened(folder, tmp_path / "cache") as llm:
        with pytest.raises(SavedBranchError, match=r'older version.*kv="recompute"'):
            llm.load_branch(saved)
        assert llm.load_branch(saved, kv="recompute").token_ids == PROMPT


def test_records_of_older_fingerprints_are_removed_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, cache = tmp_path / "model", tmp_path / "cache"
    save(make_model("llama", vocab_size=300), folder)
    byte_tokenizer(folder)
    cache.mkdir()
    for number in range(3):
        (cache / f"{number:064x}.kv").write_bytes(b"cotrtKV")
    (cache / "notes.kv").write_text("somebody's own")
    with opened(folder, cache) as llm:
        cached_tokens(llm)
    (line,) = (r.message for r in caplog.records if "older version" in r.message)
    assert line.startswith(f"{cache}: removed 3 records")
    names = [path.name for path in cache.iterdir()]
    assert "notes.kv" in names
    assert not any(len(name) == 64 + len(".kv") for name in names)
    assert any(name.endswith(".2.kv") for name in names)
