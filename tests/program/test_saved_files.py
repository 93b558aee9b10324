"""Files that do not fit, damaged ones, bad paths and arguments, and many branches in one."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from api_helpers import EOS, letters, scripted
from saved_helpers import grown

from cotrt import (
    LLM,
    Branch,
    InvalidRequestError,
    KVCacheExhaustedError,
    PromptTooLongError,
    SavedBranchError,
)
from cotrt.plan import KVShape
from cotrt.program import handle as handle_module
from cotrt.testing import ScriptedModel


def _other(**options: Any) -> LLM:
    model: dict[str, Any] = {"vocab_size": 320, "eos_token_id": EOS, **options}
    shape, under = model.pop("shape", None), model.pop("computed_under", "")
    made = ScriptedModel(letters, **model)
    made.computed_under = under
    if shape is not None:
        made.kv_shape = shape
    return LLM(made, kv_cache_memory_bytes=1 << 16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fingerprint": "another"}, "weights, dtype or RoPE differ"),
        (
            {"shape": KVShape(1, 1, 1, 2, "float16")},
            "1 heads x 1 in int32, this model's is .* 2 in",
        ),
    ],
)
def test_a_file_of_another_model(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with scripted() as llm:
        branch = llm.branch("abc")
        branch.generate(max_tokens=20).result()
        branch.save(tmp_path / "b")
        text = branch.generate(max_tokens=20).result().text
    with _other(**options) as llm:
        with pytest.raises(SavedBranchError, match=f'{message}.*kv="recompute"'):
            llm.load_branch(tmp_path / "b")
        loaded = llm.load_branch(tmp_path / "b", kv="recompute")
        assert loaded.generate(max_tokens=20).result().text == text
        assert llm.metrics["prompt_tokens_computed"] == 3


@pytest.mark.parametrize(
    ("there", "here", "taken"),
    [("", "", True), ("A", "", True), ("A", "A", True), ("A", "B", False), ("", "B", False)],
)
def test_where_bits_are_promised_kv_of_other_conditions_is_computed_again(
    tmp_path: Path, there: str, here: str, taken: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with _other(computed_under=there) as llm:
        branch = llm.branch("abc" * 20)
        branch.generate(max_tokens=20).result()
        branch.save(tmp_path / "b")
        text = branch.generate(max_tokens=20).result().text
    with _other(computed_under=here) as llm, caplog.at_level(logging.WARNING, "cotrt"):
        loaded = llm.load_branch(tmp_path / "b")
        assert loaded.generate(max_tokens=20).result().text == text
        assert (llm.metrics["prompt_tokens_computed"] == 0) == taken
    assert len(caplog.records) == (0 if taken else 1)


def test_a_file_from_when_fingerprints_named_kernels(tmp_path: Path) -> None:
    with _other(fingerprint="m-deterministic-cpu") as llm:
        llm.branch("abc").save(tmp_path / "b")
    with _other(fingerprint="m") as llm:
        assert llm.load_branch(tmp_path / "b").text == "abc"


def test_tokens_that_the_model_has_not(tmp_path: Path) -> None:
    with scripted() as llm:
        llm.branch([1, 319]).save(tmp_path / "b")
    with _other(vocab_size=319) as llm:
        for kv in ("auto", "recompute"):
            with pytest.raises(SavedBranchError, match="holds token 319.*ends at 318"):
                llm.load_branch(tmp_path / "b", kv=kv)


def test_branches_that_are_too_long(tmp_path: Path) -> None:
    with scripted() as llm:
        root = llm.branch("abc")
        child = root.fork()[0].extend("d" * 200)
        root.save(tmp_path / "b", subtree=True)
        assert child.alive
    with scripted(max_model_len=100) as llm:
        with pytest.raises(PromptTooLongError, match="203 tokens"):
            llm.load_branch(tmp_path / "b")
        assert llm.memory().in_use == 0
    model = ScriptedModel(letters, vocab_size=320, eos_token_id=EOS)
    llm = LLM(model, max_model_len=300, kv_cache_memory_bytes=1 << 9)
    with llm, pytest.raises(KVCacheExhaustedError, match="203 tokens need 13 KV blocks"):
        llm.load_branch(tmp_path / "b")


def test_damage_is_named_and_nothing_is_made(tmp_path: Path) -> None:
    path = tmp_path / "b"
    with scripted() as llm:
        root = grown(llm)
        root.save(path, subtree=True)
        good = path.read_bytes()
        living = len(llm._runtime.engine.scheduler.sequences)
        for data, message in (
            (good[:-1], "cut"),
            (good[:100], "cut"),
            (b"", "cut"),
            (b"hello", "cut"),
            (good[:-9] + b"x" + good[-8:], "damaged"),
            (good.replace(b'"version":"1"', b'"version":"9"'), "version '9'"),
        ):
            path.write_bytes(data)
            for kv in ("auto", "recompute"):
                with pytest.raises(SavedBranchError, match=message):
                    llm.load_branch(path, kv=kv)
        assert len(llm._runtime.engine.scheduler.sequences) == living
        os.unlink(path)
        with pytest.raises(SavedBranchError, match="No such file"):
            llm.load_branch(path)


@pytest.mark.parametrize("path", [None, 7, b"bytes", "", "a\0b"])
def test_paths_that_are_none(path: Any) -> None:
    with scripted() as llm:
        branch = llm.branch("abc")
        for verb in (branch.save, llm.load_branch):
            with pytest.raises(InvalidRequestError, match="the path must be a str or PathLike"):
                verb(path)


def test_wrong_arguments(tmp_path: Path) -> None:
    with scripted() as llm:
        branch = llm.branch("abc")
        with pytest.raises(InvalidRequestError, match="subtree=1"):
            branch.save(tmp_path / "b", subtree=1)  # type: ignore[arg-type]
        branch.save(tmp_path / "b")
        for kv in ("none", None, 1, "AUTO"):
            with pytest.raises(InvalidRequestError, match='must be "auto" or "recompute"'):
                llm.load_branch(tmp_path / "b", kv=kv)  # type: ignore[arg-type]


def test_a_failed_save_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with scripted() as llm:
        branch = llm.branch("abc" * 100)
        branch.generate(max_tokens=5).result()
        branch.save(tmp_path / "b")
        old = (tmp_path / "b").read_bytes()
        in_use = llm.memory().in_use
        for path, message in ((tmp_path, "is a folder"), (tmp_path / "no" / "b", "no folder")):
            with pytest.raises(SavedBranchError, match=message):
                branch.save(path)
        branch.metadata["x"] = {1, 2}
        with pytest.raises(InvalidRequestError, match=r"metadata of branch \d+\['x'\]"):
            branch.save(tmp_path / "b")
        del branch.metadata["x"]
        real, calls = os.pwrite, []

        def full(fd: int, data: Any, offset: int) -> int:
            calls.append(offset)
            if len(calls) > 14:
                raise OSError(28, "No space left on device")
            return real(fd, data, offset)

        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(SavedBranchError, match="no space left"):
            branch.save(tmp_path / "b")
        assert os.listdir(tmp_path) == ["b"]
        assert (tmp_path / "b").read_bytes() == old
        assert llm.memory().in_use == in_use
        branch.generate(max_tokens=5).result()


def test_one_warning_in_a_loop(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handle_module, "_warned_of_loop", False)
    with scripted() as llm, caplog.at_level(logging.WARNING, "cotrt"):
        branch = llm.branch("abc")

        async def main() -> None:
            branch.save(tmp_path / "b")
            llm.load_branch(tmp_path / "b")
            await asyncio.to_thread(branch.save, tmp_path / "b")

        asyncio.run(main())
    assert sum("running event loop" in record.message for record in caplog.records) == 1


def test_relative_paths_and_two_threads_at_one_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with scripted() as llm:
        branches = [llm.branch(text * 400) for text in "ab"]
        for branch in branches:
            branch.generate(max_tokens=2).result()

        def save(branch: Branch) -> None:
            for _ in range(10):
                branch.save("b.safetensors")

        threads = [threading.Thread(target=save, args=(branch,)) for branch in branches]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert os.listdir(".") == ["b.safetensors"]
        loaded = llm.load_branch("b.safetensors")
        assert loaded.token_ids in [branch.token_ids for branch in branches]


def test_a_chats_branch_is_saved(tmp_path: Path, rig: LLM) -> None:
    with rig.start_chat(system="s") as chat:
        chat.send("go:", max_tokens=20).result()
        chat.branch.save(tmp_path / "b")
        with rig.load_branch(tmp_path / "b") as loaded:
            assert loaded.token_ids == chat.branch.token_ids


def test_roots_made_later_are_numbered_after_it(tmp_path: Path) -> None:
    with scripted() as llm:
        llm.branch("abc").save(tmp_path / "b")
        second = llm.branch("xyz").generate(max_tokens=9).result().text
    with scripted() as llm:
        llm.load_branch(tmp_path / "b")
        assert llm.branch("xyz").generate(max_tokens=9).result().text == second


def test_many_branches(tmp_path: Path) -> None:
    """2,000 forks of one context, each a few tokens of its own."""
    with scripted(kv_cache_memory_bytes=1 << 22) as llm:
        root = llm.branch("context " * 50)
        children = root.fork(2000)
        children.generate(max_tokens=3, ignore_eos=True).result()
        root.save(tmp_path / "b", subtree=True)
        tokens = [child.token_ids for child in children]
        loaded = llm.load_branch(tmp_path / "b")
        assert [child.token_ids for child in loaded.children] == tokens
        assert (tmp_path / "b").stat().st_size < 2_000_000


def test_a_deep_chain_of_forks(tmp_path: Path) -> None:
    with scripted() as llm:
        root = llm.branch("a")
        kept = [root]
        for number in range(3000):
            kept.append(kept[-1].fork()[0])
            if number % 100 == 0:
                kept[-1].extend("b")
        root.save(tmp_path / "b", subtree=True)
        loaded, depth = llm.load_branch(tmp_path / "b"), 0
        branch = loaded
        while branch.children:
            branch, depth = branch.children[0], depth + 1
        assert depth == 3000
        assert branch.token_ids == kept[-1].token_ids
