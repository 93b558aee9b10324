"""Whose KV is shared: that of files which this installation signed, and of no others."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cotrt import LLM, InvalidRequestError, SamplingParams, SavedBranchError
from cotrt.engine.records import record_stores
from cotrt.engine.records.saved_source import SavedSource
from cotrt.plan import KVShape
from cotrt.program import saved_key
from cotrt.saved import layout
from cotrt.saved.layout import Chunk, SavedBranch
from cotrt.saved.reader import SavedFile
from cotrt.saved.writer import write
from cotrt.testing import ScriptedModel

PROMPT = [10 + i % 50 for i in range(70)]
ONE = SamplingParams(max_tokens=1, temperature=0)


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COTRT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COTRT_CHECK_LAWS", "1")
    monkeypatch.setattr(saved_key, "_say_once", saved_key._once())


def opened(**options: Any) -> LLM:
    model = ScriptedModel(lambda ids: {97 + len(ids) % 20: 1.0}, vocab_size=300, eos_token_id=0)
    return LLM(model, **{"kv_cache_memory_bytes": 1 << 20, **options})


def save_in(path: Path, **options: Any) -> None:
    with opened(**options) as llm:
        branch = llm.branch(PROMPT)
        branch.generate(ONE).result()
        branch.save(path)


def reused(llm: LLM, ids: list[int] = PROMPT) -> int:
    return llm.generate([ids], ONE, use_tqdm=False)[0].num_cached_tokens


def test_kv_of_a_file_of_this_installation_is_shared(tmp_path: Path) -> None:
    save_in(tmp_path / "a")
    with opened() as llm:
        branch = llm.load_branch(tmp_path / "a")
        assert reused(llm) >= 64
        branch.prune()
        assert reused(llm) >= 64


FOREIGN: dict[str, Any] = {
    "another key": {"saved_key": b"0123456789abcdef"},
    "another home": {},
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_foreign_kv_serves_the_loaded_branch_and_its_forks_alone(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_in(tmp_path / "a", **FOREIGN[kind])
    if kind == "another home":
        monkeypatch.setenv("COTRT_HOME", str(tmp_path / "home 2"))
    with opened() as llm:
        branch = llm.load_branch(tmp_path / "a")
        before = llm.metrics["prompt_tokens_computed"]
        assert branch.generate(ONE).result().token_ids
        forks = branch.fork(2)
        assert [one.token_ids for one in forks.generate(ONE).result()]
        assert llm.metrics["prompt_tokens_computed"] - before <= 3  # it was loaded, and shared
        assert reused(llm) == 0
        assert reused(llm) >= 64  # what was computed here is everybody's
        again = llm.load_branch(tmp_path / "a")
        again.generate(ONE).result()
        for each in (*forks, branch, again):
            each.prune()
        assert reused(llm, PROMPT[:40] + [7] * 20) == 40  # of the prompt's own KV
    with opened() as llm:
        branch = llm.load_branch(tmp_path / "a")
        branch.generate(ONE).result()
        branch.prune()
        assert reused(llm) == 0
        assert llm.memory().in_use == 0


def test_foreign_kv_is_not_seen_through_evictions_and_a_kept_cache(tmp_path: Path) -> None:
    save_in(tmp_path / "a", saved_key=b"0123456789abcdef")
    options = {"kv_cache_memory_bytes": 12 * 16 * 4, "prefix_cache_dir": tmp_path / "cache"}
    with opened(**options) as llm:
        branch = llm.load_branch(tmp_path / "a")
        branch.generate(ONE).result()
        for start in range(0, 200, 20):  # it is pushed out, and comes back
            llm.generate([[100 + start // 2 + i % 9 for i in range(80)]], ONE, use_tqdm=False)
        assert branch.generate(ONE).result().token_ids
        assert reused(llm) == 0
    with opened(**options) as llm:
        llm.load_branch(tmp_path / "a").generate(ONE).result()
    with opened(prefix_cache_dir=tmp_path / "cache 2") as llm:
        llm.load_branch(tmp_path / "a").generate(ONE).result()
    with opened(prefix_cache_dir=tmp_path / "cache 2") as llm:
        assert reused(llm) == 0


def test_a_branch_of_foreign_kv_is_not_signed_when_it_is_saved(tmp_path: Path) -> None:
    save_in(tmp_path / "a", saved_key=b"0123456789abcdef")
    with opened() as llm:
        child = llm.load_branch(tmp_path / "a").fork()[0]
        child.generate(SamplingParams(max_tokens=5)).result()
        child.save(tmp_path / "b")
        root = llm.branch(PROMPT)
        root.generate(ONE).result()
        root.save(tmp_path / "c")
    with opened() as llm:
        llm.load_branch(tmp_path / "b").generate(ONE).result()
        assert reused(llm) == 0
    with opened() as llm:
        llm.load_branch(tmp_path / "c").generate(ONE).result()
        assert reused(llm) >= 64


def forged(path: Path, signature: str | None, value: int = 7) -> None:
    with opened() as llm:
        model = llm._runtime.engine.model
        shape, fingerprint = model.kv_shape, model.fingerprint
    tokens = np.array(PROMPT, np.int32)
    branch = SavedBranch(tokens, np.full(70, np.nan), np.zeros(70, np.uint8))
    kv = np.full(64 * shape.token_bytes, value, np.uint8)
    write(path, [branch], [(Chunk(0, 0, 64), kv)], shape=shape, fingerprint=fingerprint,
          key=None if signature is None else b"x" * 32)  # fmt: skip
    if signature:
        data = path.read_bytes()
        file = SavedFile(path)
        old = file._signature
        file.close()
        path.write_bytes(data.replace(old.encode(), signature.encode()))


@pytest.mark.parametrize("signature", [None, "0" * 64, "f" * 64])
def test_a_forged_file_poisons_nobody(signature: str | None, tmp_path: Path) -> None:
    forged(tmp_path / "a", signature)
    with opened() as llm:
        branch = llm.load_branch(tmp_path / "a")
        branch.generate(ONE).result()
        assert reused(llm) == 0
        outputs = llm.generate([PROMPT], ONE, use_tqdm=False)[0].outputs[0]
        assert outputs.token_ids == [97 + 70 % 20]


def test_every_byte_is_under_the_signature(tmp_path: Path) -> None:
    save_in(tmp_path / "a")
    whole = (tmp_path / "a").read_bytes()
    file = SavedFile(tmp_path / "a")
    key = saved_key.read_saved_key(None)
    assert key is not None and file.is_signed_by(key)
    assert not file.is_signed_by(key[:-1] + b"?")
    file.close()
    draw = np.random.default_rng(0)
    for at in draw.integers(0, len(whole), 60).tolist():
        data = bytearray(whole)
        data[at] ^= 1 << int(draw.integers(0, 8))
        (tmp_path / "b").write_bytes(data)
        try:
            changed = SavedFile(tmp_path / "b")
        except SavedBranchError:
            continue
        assert not changed.is_signed_by(key), at
        changed.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_kv_that_is_not_finite_is_refused_when_it_is_read(dtype: str, tmp_path: Path) -> None:
    shape = KVShape(1, 2, 1, 16, dtype)
    none = np.full(4, np.nan)
    branch = SavedBranch(np.arange(4, dtype=np.int32), none, np.zeros(4, np.uint8))
    kv = np.zeros(4 * shape.token_bytes, np.uint8)

    def read(record: Any) -> Any:
        chunk = Chunk(0, 0, 4)
        write(tmp_path / "a", [branch], [(chunk, record)], shape=shape, fingerprint="m")
        source = SavedSource(SavedFile(tmp_path / "a"), name="m", block_size=16)
        try:
            (handle,) = source.keys().values()
            return record_stores._read_source(source, handle, dtype)
        finally:
            source.close()

    assert read(kv).size == kv.size
    for bits in (0x7F80, 0xFF80, 0x7FC1) if dtype == "bfloat16" else (np.inf, -np.inf, np.nan):
        bad = kv.copy()
        bad.view({"bfloat16": "<u2", "float16": "<f2", "float32": "<f4"}[dtype])[37] = bits
        with pytest.raises(SavedBranchError, match="not finite"):
            read(bad)


def test_the_key_is_made_once_for_its_owner_alone_by_many_processes(tmp_path: Path) -> None:
    source = "from cotrt.program.saved_key import read_saved_key; print(read_saved_key(None).hex())"
    processes = [
        subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE) for _ in range(6)
    ]
    keys = {process.communicate()[0] for process in processes}
    assert len(keys) == 1 and len(keys.pop().strip()) == 64
    path = tmp_path / "home" / "saved.key"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [p.name for p in path.parent.iterdir()] == ["saved.key"]


def test_a_home_that_cannot_be_written_signs_nothing_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("COTRT_HOME", str(tmp_path / "file" / "home"))
    with caplog.at_level(logging.WARNING, "cotrt"):
        save_in(tmp_path / "a")
        with opened() as llm:
            llm.load_branch(tmp_path / "a").generate(ONE).result()
            assert reused(llm) == 0
    assert len([r for r in caplog.records if "not signed" in r.message]) == 1


def test_a_key_may_be_given_as_bytes_or_in_a_file(tmp_path: Path) -> None:
    key = os.urandom(32)
    (tmp_path / "key").write_bytes(key)
    save_in(tmp_path / "a", saved_key=tmp_path / "key")
    with opened(saved_key=key) as llm:
        llm.load_branch(tmp_path / "a").generate(ONE).result()
        assert reused(llm) >= 64
    assert not (tmp_path / "home").exists()
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        opened(saved_key=tmp_path / "nowhere")
    (tmp_path / "key").write_bytes(b"short")
    with pytest.raises(InvalidRequestError, match="has 5 bytes"):
        opened(saved_key=str(tmp_path / "key"))
    with opened(saved_key=key) as llm:
        assert key.hex() not in repr(llm.config) and repr(key) not in repr(llm.config)


def test_files_without_a_signature_are_read_as_before(tmp_path: Path) -> None:
    forged(tmp_path / "a", None)
    assert layout.NO_SIGNATURE.encode() not in (tmp_path / "a").read_bytes()[:4096].replace(
        b'"digest":"' + layout.NO_SIGNATURE.encode(), b""
    )
    with opened() as llm:
        assert llm.load_branch(tmp_path / "a").token_ids == PROMPT
