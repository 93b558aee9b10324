"""KV of saved branches: where it is taken from, what is loaded and what is computed."""

from __future__ import annotations

import gc
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from api_helpers import scripted
from saved_helpers import grown

from cotrt import (
    LLM,
    SamplingParams,
    SavedBranchError,
)
from cotrt.saved.reader import SavedFile


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("block_size", [8, 16, 128])
def test_nothing_is_computed_again(tmp_path: Path, block_size: int, prefix_caching: bool) -> None:
    with scripted() as llm:
        branch = llm.branch("p" * 500)
        branch.generate(max_tokens=30, ignore_eos=True).result()
        branch.save(tmp_path / "b")
        before = llm.metrics
        text = branch.generate(max_tokens=20).result().text
        after = llm.metrics
    with scripted(block_size=block_size, enable_prefix_caching=prefix_caching) as llm:
        loaded = llm.load_branch(tmp_path / "b")
        assert loaded.kv.location == "disk"
        output = llm.generate([loaded], SamplingParams(max_tokens=20))[0]
        assert output.outputs[0].text == text
        assert loaded.kv.location == "device"
        assert output.num_cached_tokens == 529
        metrics = llm.metrics
        assert metrics["loaded_tokens"] == 529
        for name in ("prompt_tokens_computed", "recomputed_tokens", "failed_loads"):
            assert metrics[name] == 0
        name = "generated_tokens_computed"
        assert metrics[name] == after[name] - before[name]


def test_a_tree_shares_what_is_loaded(tmp_path: Path) -> None:
    with scripted() as llm:
        root = llm.branch("p" * 333)
        children = root.fork(8)
        children.generate(max_tokens=40, ignore_eos=True).result()
        root.save(tmp_path / "b", subtree=True)
        texts = [g.text for g in children.generate(max_tokens=9, ignore_eos=True).result()]
    with scripted(block_size=32) as llm:
        loaded = llm.load_branch(tmp_path / "b")
        work = loaded.children.generate(max_tokens=9, ignore_eos=True)
        assert [g.text for g in work.result()] == texts
        metrics = llm.metrics
        assert metrics["prompt_tokens_computed"] == metrics["recomputed_tokens"] == 0
        assert metrics["generated_tokens_computed"] == 8 * 9
        assert metrics["loaded_tokens"] <= 333 + 8 * (40 + 32)


def test_a_loaded_branch_that_is_cut_extended_or_forked_takes_what_is_there(tmp_path: Path) -> None:
    with scripted() as llm:
        branch = llm.branch("p" * 300)
        branch.generate(max_tokens=1).result()
        branch.save(tmp_path / "b")
    with scripted() as llm:
        cut, longer = (llm.load_branch(tmp_path / "b") for _ in range(2))
        forked = longer.fork(at=164)[0]
        cut.truncate(100).generate(max_tokens=3).result()
        assert llm.metrics["prompt_tokens_computed"] <= 4
        longer.extend("more").generate(max_tokens=3).result()
        forked.extend("else").generate(max_tokens=3).result()
        assert llm.metrics["prompt_tokens_computed"] <= 4 + 5 + 4 + 4
        texts = [each.text for each in (cut, longer, forked)]
    with scripted() as llm:
        cut, longer = (llm.load_branch(tmp_path / "b", kv="recompute") for _ in range(2))
        forked = longer.fork(at=164)[0]
        cut.truncate(100).generate(max_tokens=3).result()
        longer.extend("more").generate(max_tokens=3).result()
        forked.extend("else").generate(max_tokens=3).result()
        assert [each.text for each in (cut, longer, forked)] == texts


def test_what_is_damaged_after_the_load_is_computed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "b"
    with scripted() as llm:
        branch = llm.branch("p" * 500)
        branch.generate(max_tokens=1).result()
        branch.save(path)
        text = branch.generate(max_tokens=20).result().text
        good = path.read_bytes()
    for data in (good[: len(good) // 3], good[:1000] + bytes(len(good) - 1000)):
        path.write_bytes(good)
        with scripted() as llm, caplog.at_level(logging.WARNING, "cotrt"):
            loaded = llm.load_branch(path)
            with open(path, "r+b") as file:  # in place: the same file
                file.truncate(len(data))
                file.write(data)
            assert loaded.generate(max_tokens=20).result().text == text
            assert llm.metrics["failed_loads"] > 0
            assert 0 < llm.metrics["prompt_tokens_computed"] <= 500
    assert any("cannot be read, its tokens are computed" in r.message for r in caplog.records)


def test_a_loaded_branch_is_saved_again_without_being_read_into_the_pool(tmp_path: Path) -> None:
    with scripted() as llm:
        root = grown(llm)
        root.save(tmp_path / "a", subtree=True)
    with scripted(block_size=64) as llm:
        llm.load_branch(tmp_path / "a").save(tmp_path / "b", subtree=True)
        assert llm.metrics["steps"] == 0
    first, second = SavedFile(tmp_path / "a"), SavedFile(tmp_path / "b")
    assert [c.name for c in second.chunks] == [c.name for c in first.chunks]
    for chunk in first.chunks:
        span = (chunk.branch, chunk.start, chunk.start + chunk.num_tokens)
        assert np.array_equal(first.read_kv(*span), second.read_kv(*span))
    first.close()
    second.close()


@pytest.mark.parametrize("block_size", [8, 256])
def test_kv_on_disk_is_saved_from_there(tmp_path: Path, block_size: int) -> None:
    """Four branches of 300 tokens in a pool of 600: what is not in the pool is on disk."""
    options = {"block_size": block_size, "kv_cache_memory_bytes": 4 * 768, "disk_space": 0.01}
    with scripted(**options) as llm:
        llm._runtime.engine.tree.tiers.costs._always = "move"
        branches = [llm.branch(c * 300) for c in "abcd"]
        for branch in branches:
            branch.generate(max_tokens=1).result()
        assert llm.metrics["stored_blocks"] > 0
        steps = llm.metrics["steps"]
        for number, branch in enumerate(branches):
            branch.save(tmp_path / str(number))
        assert llm.metrics["prompt_tokens_computed"] == 1200
        assert llm.metrics["steps"] <= steps + 1
    saved = 0
    for number in range(4):
        file = SavedFile(tmp_path / str(number))
        saved += sum(chunk.num_tokens for chunk in file.chunks)
        for chunk in file.chunks:
            record = file.read_kv(0, chunk.start, chunk.start + chunk.num_tokens)
            assert record.view(np.int32).tolist() == [ord("abcd"[number])] * chunk.num_tokens
        file.close()
    assert saved >= 1200 - 4 * block_size


def test_files_are_given_up_with_the_last_of_what_was_loaded(tmp_path: Path) -> None:
    def num_open() -> int:
        gc.collect()
        return sum(
            os.path.realpath(f"/proc/self/fd/{fd}").startswith(str(tmp_path))
            for fd in os.listdir("/proc/self/fd")
        )

    with scripted() as llm:
        branch = llm.branch("p" * 100)
        branch.generate(max_tokens=1).result()
        branch.save(tmp_path / "b")
        loaded = [llm.load_branch(tmp_path / "b") for _ in range(5)]
        assert num_open() == 5
        child = loaded.pop().fork()[0]
        llm.memory()
        assert num_open() == 5
        loaded.clear()
        llm.memory()
        assert num_open() == 1
        del child
        llm.memory()
        assert num_open() == 0
        kept = llm.load_branch(tmp_path / "b", kv="recompute")
        assert num_open() == 0
        again = llm.load_branch(tmp_path / "b")
        assert num_open() == 1
    assert num_open() == 0
    del kept, again


def test_bits_of_a_real_model_between_block_sizes_and_kernels(tmp_path: Path) -> None:
    """Saved by the native kernels (where they are built), loaded by plain torch, and back."""
    from checkpoints import make_model
    from checkpoints import save as save_checkpoint

    folder = save_checkpoint(make_model("llama", std=0.15), tmp_path / "model")
    options: dict[str, Any] = {"kv_cache_memory_bytes": 1 << 22, "dtype": "float32"}
    ids = [1 + i % 90 for i in range(300)]
    with LLM(folder, **options) as llm:
        branch = llm.branch(ids)
        branch.generate(max_tokens=20, ignore_eos=True).result()
        branch.save(tmp_path / "a")
        text = branch.generate(max_tokens=20, temperature=0, ignore_eos=True).result().token_ids
    for backend, size in (("reference", 32), ("auto", 64), ("auto", 8)):
        with LLM(folder, attention_backend=backend, block_size=size, **options) as llm:
            loaded = llm.load_branch(tmp_path / "a")
            work = loaded.fork()[0].generate(max_tokens=20, temperature=0, ignore_eos=True)
            assert work.result().token_ids == text
            assert llm.metrics["prompt_tokens_computed"] == 0
            loaded.save(tmp_path / "b")
            first, second = SavedFile(tmp_path / "a"), SavedFile(tmp_path / "b")
            for start in range(0, 319, 64):
                stop = min(319, start + 64)
                assert np.array_equal(first.read_kv(0, start, stop), second.read_kv(0, start, stop))
            first.close()
            second.close()
    llm = LLM(folder, kv_cache_memory_bytes=1 << 22, dtype="bfloat16")
    with llm, pytest.raises(SavedBranchError, match="float32, this model's is .*bfloat16"):
        llm.load_branch(tmp_path / "a")
