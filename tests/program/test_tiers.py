"""Memory tiers as a program sees them: options, equality, the prefix cache of the last process."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from api_helpers import eventually, is_idle, letters, run_program
from test_cases_concurrency import repeat_code_words, repeat_the_word

from cotrt import LLM, InvalidRequestError
from cotrt.testing import ScriptedModel
from cotrt.tree.tiers.tier_costs import TierCosts

BLOCK = 16 * 4
MIB = 1 / 1024


def open_llm(tier: str | None, folder: Path, next_probs: Any = letters, **options: Any) -> LLM:
    tiers: dict[str | None, dict[str, Any]] = {
        None: {},
        "host": {"swap_space": 4 * MIB},
        "disk": {"disk_space": 16 * MIB, "disk_dir": folder},
        "both": {"swap_space": 20 * BLOCK / 2**30, "disk_space": 16 * MIB, "disk_dir": folder},
        "kept": {"prefix_cache_dir": folder / "cache"},
    }
    model = ScriptedModel(next_probs, vocab_size=320, eos_token_id=0, has_device_memory=True)
    return LLM(model, **({"swap_space": 0} | tiers[tier] | options))


@pytest.fixture
def moving(monkeypatch: pytest.MonkeyPatch) -> None:
    """KV is moved whatever it costs: a model of nothing computes faster than a disk."""
    monkeypatch.setattr(TierCosts, "_moves", lambda self, num_tokens, seconds: True)


@pytest.mark.parametrize("tier", [None, "host", "disk", "both", "kept"])
def test_24_branches_in_a_third_of_the_room_that_they_need(
    tier: str | None, tmp_path: Path, moving: None
) -> None:
    def program(tier: str | None, num_blocks: int) -> tuple[Any, dict[str, int]]:
        with open_llm(tier, tmp_path, kv_cache_memory_bytes=num_blocks * BLOCK) as llm:
            root = llm.branch("a beginning that they share, of sixty characters or about it:")
            branches = root.fork(24)
            for number, branch in enumerate(branches):
                branch.extend(chr(97 + number) * (10 + number))
            branches.generate(max_tokens=40, ignore_eos=True).result()
            for number, branch in enumerate(branches):
                branch.extend("and on" + chr(97 + number))
            branches.generate(max_tokens=40, ignore_eos=True).result()
            shown = [(b.token_ids, b.logprobs) for b in branches]
            metrics = llm.metrics
            root.prune()
            memory = llm.memory()
            assert (memory.in_use, memory.free + memory.cached) == (0, num_blocks)
            return shown, metrics

    needed = 4 + sum(-(-(17 + n + 80) // 16) for n in range(24))
    large, calm = program(None, 2 * needed)
    small, metrics = program(tier, needed // 3)
    assert small == large
    for name in ("prompt_tokens_computed", "generated_tokens_computed", "generated_tokens"):
        assert metrics[name] == calm[name]
    assert (metrics["loaded_tokens"] > 0) == (tier is not None)
    if tier != "kept":
        assert [p for p in tmp_path.iterdir() if p.name != "cache"] == []


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_b39_no_foreign_word_ever_where_kv_moves(tier: str, tmp_path: Path, moving: None) -> None:
    """Case B39 with a tier: sessions kept across rounds, identical prefixes, aborts."""
    with open_llm(tier, tmp_path, repeat_the_word, kv_cache_memory_bytes=40 * BLOCK) as llm:
        branches = repeat_code_words(llm, 10)
        assert llm.metrics["loaded_tokens"] > 0
        del branches[:]
        assert eventually(lambda: is_idle(llm))


def test_the_prefix_cache_outlives_the_process(tmp_path: Path) -> None:
    prompt = "The prompt that both of them have, long enough for some blocks. " * 4
    computed, texts = [], []
    for _ in range(2):
        with open_llm("kept", tmp_path) as llm:
            out = llm.generate(prompt, use_tqdm=False)[0]
            texts.append(out.outputs[0].text)
            computed.append(llm.metrics["prompt_tokens_computed"])
            assert eventually(lambda llm=llm: llm.memory().disk >= len(prompt) // 16)
    assert texts[0] == texts[1]
    assert computed[0] == len(prompt)
    assert computed[1] in (0, len(prompt)), "all of it, or none where the costs say so"


def test_the_prefix_cache_is_read_by_the_next_process(tmp_path: Path, moving: None) -> None:
    prompt = "x" * 161
    for turn in range(2):
        with open_llm("kept", tmp_path) as llm:
            out = llm.generate(prompt, use_tqdm=False)[0]
            assert llm.metrics["loaded_tokens"] == 160 * turn
            assert out.num_cached_tokens == 160 * turn
            assert llm.metrics["prompt_tokens_computed"] == (1 if turn else 161)


def test_where_kv_is_can_be_seen(tmp_path: Path, moving: None) -> None:
    with open_llm("host", tmp_path, kv_cache_memory_bytes=20 * BLOCK) as llm:
        idle = llm.branch("a" * 100)
        idle.generate(max_tokens=2, ignore_eos=True).result()
        assert idle.kv.location == "device" and llm.memory().host == 0
        llm.branch("b" * 310).generate(max_tokens=2, ignore_eos=True).result()
        assert idle.kv.location == "host"
        assert llm.memory().host == llm.metrics["host_blocks"] >= 6
        idle.generate(max_tokens=2, ignore_eos=True).result()
        assert idle.kv.location == "device" and llm.metrics["loaded_tokens"] >= 96


def test_refusals(tmp_path: Path) -> None:
    plain = ScriptedModel(letters, vocab_size=320, eos_token_id=0)
    with pytest.raises(InvalidRequestError, match="no host tier"):
        LLM(plain, swap_space=1)
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequestError, match=r"prefix_cache_dir: KV cannot be kept there"):
        LLM(plain, prefix_cache_dir=tmp_path / "file" / "cache")
    with pytest.raises(InvalidRequestError, match=r"disk_dir: KV cannot be kept there"):
        LLM(plain, disk_space=1, disk_dir=tmp_path / "file")
    nameless = ScriptedModel(letters, vocab_size=320, eos_token_id=0, fingerprint="")
    with pytest.raises(InvalidRequestError, match="no fingerprint"):
        LLM(nameless, prefix_cache_dir=tmp_path / "cache")


def test_nothing_is_said_while_all_is_well(
    tmp_path: Path, moving: None, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING, "cotrt"),
        open_llm("both", tmp_path, kv_cache_memory_bytes=20 * BLOCK) as llm,
    ):
        for letter in "abcabc":
            llm.generate(letter * 200, use_tqdm=False)
    assert not caplog.records


def test_a_private_folder_goes_when_nobody_has_the_model_and_at_the_programs_end(
    tmp_path: Path,
) -> None:
    source = f"""
    from pathlib import Path
    folder = Path({str(tmp_path)!r})
    llm = scripted(disk_space=1.0, disk_dir=folder)
    llm.generate("abc" * 20)
    print(len(list(folder.iterdir())))
    del llm
    print(eventually(lambda: gc.collect() >= 0 and not list(folder.iterdir())))
    llm = scripted(disk_space=1.0, disk_dir=folder)
    llm.generate("abc" * 20)
    """
    done = run_program(source)
    assert done.stdout == "1\nTrue\n", (done.stdout, done.stderr)
    assert done.returncode == 0 and done.stderr == ""
    assert not list(tmp_path.iterdir())
