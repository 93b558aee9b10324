"""Saved, and loaded by another LLM: as if it had never been away."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from api_helpers import EOS, Gate, eventually, letters, run_program, scripted, slowly
from saved_helpers import describe, go_on, grown

from cotrt import (
    LLM,
    BranchPrunedError,
    StructuredOutputs,
)
from cotrt.engine import saving
from cotrt.saved.reader import SavedFile


@pytest.mark.parametrize("block_size", [8, 64])
def test_a_subtree_goes_on_as_if_it_had_never_been_saved(tmp_path: Path, block_size: int) -> None:
    with scripted(seed=3) as llm:
        root = grown(llm)
        before = describe(root)
        in_use = llm.memory().in_use
        root.save(tmp_path / "tree", subtree=True)
        assert describe(root) == before
        assert llm.memory().in_use == in_use
        after = go_on(root)
    with scripted(seed=11, block_size=block_size) as llm:
        loaded = llm.load_branch(tmp_path / "tree")
        assert describe(loaded) == before
        assert loaded.parent is None
        assert loaded.depth == 0
        gc.collect()
        assert describe(loaded) == before  # the children live as long as the root
        assert go_on(loaded) == after


def test_one_branch_of_a_tree_takes_its_ancestors_tokens_and_no_others(tmp_path: Path) -> None:
    with scripted() as llm:
        root = grown(llm)
        child = root.children[0]
        child.fork(2)
        child.save(tmp_path / "child")
        before, after = describe(child), go_on(child)
    with scripted() as llm:
        loaded = llm.load_branch(tmp_path / "child")
        assert not loaded.children
        assert describe(loaded) == {**before, "children": []}
        # Its next forks are its third and fourth; the first two were left behind.
        assert go_on(loaded) == after


def test_another_process_goes_on_with_the_same_words_and_computes_no_prompt(
    tmp_path: Path,
) -> None:
    """Branches of a scripted model and of a checkpoint."""
    from checkpoints import make_model
    from checkpoints import save as save_checkpoint

    folder = str(save_checkpoint(make_model("llama", std=0.15), tmp_path / "model"))
    real: dict[str, Any] = {"kv_cache_memory_bytes": 1 << 22, "dtype": "float32"}
    paths, told = [str(tmp_path / name) for name in ("scripted", "checkpoint")], []
    given: list[Any] = ["Once ", [1 + i % 90 for i in range(100)]]
    how = {"max_tokens": 50, "ignore_eos": True}
    for llm, path, prompt in zip([scripted(letters), LLM(folder, **real)], paths, given):
        with llm:
            branch = llm.branch(prompt)
            branch.generate(**how).result()
            branch.save(path)
            told.append(str(branch.generate(**how).result().token_ids))
            told.append(str(branch.fork().generate(**how).result()[0].token_ids))
    done = run_program(f"""
        llms = [scripted(seed=5, block_size=32), LLM({folder!r}, seed=5, block_size=32, **{real!r})]
        for llm, path in zip(llms, {paths!r}):
            branch = llm.load_branch(path)
            print(branch.generate(**{how!r}).result().token_ids)
            print(branch.fork().generate(**{how!r}).result()[0].token_ids)
            names = ("prompt_tokens_computed", "recomputed_tokens", "loaded_tokens")
            print(*(llm.metrics[name] for name in names))
    """)
    # All but the last sampled token of 5 + 50 and 100 + 50 had been computed, and came from files.
    lines = [*told[:2], "0 0 54", *told[2:], "0 0 149"]
    assert done.stdout.splitlines() == lines, done.stderr


def test_a_running_branch_is_saved_as_published_at_the_call(tmp_path: Path) -> None:
    gate = Gate(letters)
    with scripted(gate) as llm:
        branch = llm.branch("abc")
        work = branch.generate(max_tokens=40)
        assert eventually(lambda: len(branch) > 10)
        gate.shut()
        assert gate.reached.wait(20)
        published = branch.token_ids
        saver = threading.Thread(target=branch.save, args=(tmp_path / "b",))
        saver.start()
        assert eventually(lambda: len(llm._runtime.engine.scheduler.sequences) > 1)
        gate.open.set()
        saver.join()
        text = work.result().text
        assert branch.alive
    with scripted() as llm:
        loaded = llm.load_branch(tmp_path / "b")
        assert loaded.token_ids == published
        rest = loaded.generate(max_tokens=40 - (len(published) - 3)).result().text
        assert loaded.text == "abc" + text
        assert text.endswith(rest)


def test_saving_leaves_running_work_alone(tmp_path: Path) -> None:
    """64 tokens a piece: many pieces, and a step between each two."""
    with scripted(slowly(letters, 1e-3), max_num_batched_tokens=64) as llm:
        quiet = llm.branch("q" * 3000)
        quiet.generate(max_tokens=1).result()
        branches = llm.branch("abc").fork(4)
        work = branches.generate(max_tokens=60)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(saving, "_PIECE_BYTES", 1024)
            quiet.save(tmp_path / "b")
        texts = [output.text for output in work.result()]
    with scripted(letters) as llm:
        branches = llm.branch("q") and llm.branch("abc").fork(4)
        assert [output.text for output in branches.generate(max_tokens=60).result()] == texts
    file = SavedFile(tmp_path / "b")
    assert sum(chunk.num_tokens for chunk in file.chunks) == 3000
    file.close()


def test_the_kv_in_the_file_is_that_of_its_tokens(tmp_path: Path) -> None:
    with scripted(block_size=8) as llm:
        root = grown(llm)
        root.save(tmp_path / "b", subtree=True)
    file = SavedFile(tmp_path / "b")
    saved = 0
    for chunk in file.chunks:
        record = file.read_kv(chunk.branch, chunk.start, chunk.start + chunk.num_tokens)
        own = file.branches[chunk.branch]
        first = chunk.start - own.shared
        assert record.view(np.int32).tolist() == own.tokens[first:][: chunk.num_tokens].tolist()
        saved += chunk.num_tokens
    computed = sum(len(branch.tokens) for branch in file.branches)
    assert saved >= computed - 2 * len(file.branches) - 10  # all but what no step has computed
    file.close()


def test_what_is_nowhere_is_saved_without_kv(tmp_path: Path) -> None:
    with scripted() as llm:
        branch = llm.branch("never computed")
        branch.save(tmp_path / "b")
        assert llm.metrics["steps"] == 0
        text = branch.generate(max_tokens=10).result().text
    with scripted() as llm:
        assert llm.load_branch(tmp_path / "b").generate(max_tokens=10).result().text == text


def test_an_empty_branch(tmp_path: Path) -> None:
    with scripted() as llm:
        llm.branch([]).save(tmp_path / "b")
        loaded = llm.load_branch(tmp_path / "b")
        assert loaded.token_ids == []
        loaded.extend("abc").generate(max_tokens=3).result()


def test_a_generation_under_a_grammar_goes_on_under_it(tmp_path: Path) -> None:
    rule = StructuredOutputs(regex="[a-z]{6}!")

    def words(ids: Any) -> dict[int, float]:
        return {**letters(ids), ord("!"): 1.0, EOS: 1.0}

    with scripted(words) as llm:
        branch = llm.branch("abc ")
        branch.generate(max_tokens=3, structured_outputs=rule).result()
        branch.save(tmp_path / "b")
        text = branch.generate(max_tokens=30, structured_outputs=rule).result().text
    with scripted(words) as llm:
        loaded = llm.load_branch(tmp_path / "b")
        assert loaded.generate(max_tokens=30, structured_outputs=rule).result().text == text
        assert loaded.text.rstrip(chr(EOS)).endswith("!") and len(text) == 4


def test_pruned_and_closed_branches_refuse(tmp_path: Path) -> None:
    with scripted() as llm:
        pruned, closed = llm.branch("abc"), llm.branch("abc")
        pruned.prune()
        closed.close()
        for branch in (pruned, closed):
            with pytest.raises(BranchPrunedError):
                branch.save(tmp_path / "b")
    assert os.listdir(tmp_path) == []


def test_a_prune_while_it_is_saved_ends_the_save_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "_PIECE_BYTES", 1)
    with scripted() as llm:
        branch = llm.branch("abc" * 200)
        branch.generate(max_tokens=1).result()
        real = saving.SavedWriter.write_kv

        def prune_first(self: Any, chunk: Any, record: Any) -> None:
            branch.prune()
            real(self, chunk, record)

        monkeypatch.setattr(saving.SavedWriter, "write_kv", prune_first)
        with pytest.raises(BranchPrunedError, match="was pruned while it was saved"):
            branch.save(tmp_path / "b")
        assert os.listdir(tmp_path) == []
        assert llm.memory().in_use == 0


def test_a_save_under_pressure_takes_nothing_from_running_work(tmp_path: Path) -> None:
    """A pool of 20 blocks, full: files lack KV, and the running branch ends as it would."""
    with scripted(block_size=8, kv_cache_memory_bytes=20 * 8 * 4) as llm:
        idle = llm.branch("i" * 70)
        idle.generate(max_tokens=1).result()
        running = llm.branch("r" * 40)
        work = running.generate(max_tokens=100)
        for number in range(10):
            assert eventually(lambda n=number: len(running) >= 40 + 10 * n)
            idle.save(tmp_path / f"b{number}")
        text = work.result().text
        rest = idle.generate(max_tokens=5).result().text
    num_saved = []
    for number in range(10):
        file = SavedFile(tmp_path / f"b{number}")
        num_saved.append(sum(chunk.num_tokens for chunk in file.chunks))
        file.close()
    assert min(num_saved) < 70, num_saved  # the running branch needs 18 blocks in the end
    with scripted() as llm:
        llm.branch("i" * 70)
        assert llm.branch("r" * 40).generate(max_tokens=100).result().text == text
        for number in range(10):
            loaded = llm.load_branch(tmp_path / f"b{number}")
            assert loaded.generate(max_tokens=5).result().text == rest


def test_a_closed_llm_saves_and_loads_no_more(tmp_path: Path) -> None:
    from cotrt import EngineDeadError

    with scripted() as llm:
        branch = llm.branch("abc")
        branch.save(tmp_path / "b")
    with pytest.raises(EngineDeadError):
        branch.save(tmp_path / "c")
    with pytest.raises(EngineDeadError):
        llm.load_branch(tmp_path / "b")
    assert os.listdir(tmp_path) == ["b"]
