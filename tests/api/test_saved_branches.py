"""Saved, and loaded by another LLM: as if it had never been away."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from api_helpers import EOS, Gate, eventually, letters, run_program, scripted, slowly

from cotrt import (
    LLM,
    Branch,
    BranchPrunedError,
    InvalidRequestError,
    KVCacheExhaustedError,
    PromptTooLongError,
    SamplingParams,
    SavedBranchError,
    StructuredOutputs,
)
from cotrt import handle as handle_module
from cotrt.engine import saving
from cotrt.plan import KVShape
from cotrt.saved.reader import SavedFile
from cotrt.testing import ScriptedModel


def describe(branch: Branch) -> dict[str, Any]:
    """What a program can see of a branch and of those below it."""
    return {
        "tokens": branch.token_ids,
        "logprobs": branch.logprobs,
        "sampled": branch.sampled,
        "finished": branch.finished,
        "metadata": branch.metadata,
        "children": [describe(child) for child in branch.children],
    }


def go_on(branch: Branch) -> list[Any]:
    """What a program may do with a branch, and all that it brings."""
    found: list[Any] = [branch.generate(max_tokens=20).result().token_ids]
    found += [g.token_ids for g in branch.fork(2).generate(max_tokens=9).result()]
    branch.truncate(len(branch) - 7)
    found.append(branch.generate(max_tokens=9).result().token_ids)
    found += [score.logprobs for score in branch.score(["ab", "c"]).result()]
    found.append(branch.choose(["x", "yz"]).result().index)
    found += [go_on(child) for child in branch.children[:1]]
    return found


def grown(llm: LLM) -> Branch:
    """A branch with a past: retries, forks that were pruned, a closed child with children."""
    root = llm.branch("In the beginning " * 5)
    root.generate(max_tokens=30).result()
    root.truncate(60)
    root.generate(max_tokens=25, seed=9).result()
    children = root.fork(4)
    children[0].prune()
    children[1:].extend(" and then")
    children[1:].generate(max_tokens=40).result()
    children[1].metadata.update(score=-0.5, notes=["a", {"b": None}])
    grand = children[2].fork(2, at=50)
    grand.generate(max_tokens=5).result()
    children[2].truncate(40)
    children[2].extend("elsewhere")
    children[2].close()
    root._kept = [*children, *grand]  # so that they live as long as the root
    return root


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


# ---- files that do not fit ---------------------------------------------------------------------


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


# ---- KV ------------------------------------------------------------------------------------------


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
