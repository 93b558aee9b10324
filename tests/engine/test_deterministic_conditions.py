"""deterministic=True: KV that other conditions gave other bits is never taken for our own."""

from __future__ import annotations

import functools
import json
import logging
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "models"))
from checkpoints import make_model, save

from cotrt import LLM, SamplingParams
from cotrt.kernels.cpu.native import isa, missing_reason

pytestmark = pytest.mark.skipif(
    missing_reason() is not None or isa() == "generic", reason="there is one instruction set here"
)

VOCAB = 203
PROMPT = [random.Random(i).randrange(3, VOCAB) for i in range(300)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = make_model("qwen3", std=0.12, vocab_size=VOCAB, num_hidden_layers=2)
    return save(model, tmp_path_factory.mktemp("qwen3"))


def open_llm(folder: str | Path, **options: Any) -> LLM:
    return LLM(folder, dtype="float32", kv_cache_memory_bytes=8 << 20, **options)


def answer(llm: LLM) -> list[Any]:
    """What follows the prompt: ids and, to the bit, their logprobs."""
    branch = llm.branch(PROMPT)
    output = branch.generate(SamplingParams(temperature=0, max_tokens=8, logprobs=1)).result()
    return [output.token_ids, [p.hex() for p in branch.logprobs[len(PROMPT) :]]]


def fill(folder: str, cache: str, saved: str, deterministic: bool) -> None:
    """Leave the prompt's KV in a prefix cache and in a file."""
    with open_llm(folder, deterministic=deterministic, prefix_cache_dir=cache) as llm:
        answer(llm)
        branch = llm.branch(PROMPT)
        branch.generate(max_tokens=1).result()
        branch.save(saved)
        print(json.dumps(isa()))


def fill_elsewhere(set_name: str, *arguments: Any) -> None:
    """`fill` by a process on another instruction set."""
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        f"import {Path(__file__).stem} as here; here.fill(*{arguments!r})\n"
    )
    environment = {
        **os.environ,
        "COTRT_CPU_ISA": set_name,
        "PYTHONPATH": str(Path(__file__).parent.parent.parent),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == set_name


@pytest.fixture(scope="module")
def elsewhere(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, bool], tuple[Path, Path]]:
    """Cache and file that an instruction set has filled, with the option or without."""

    @functools.cache
    def made(set_name: str, deterministic: bool) -> tuple[Path, Path]:
        room = tmp_path_factory.mktemp("room")
        cache, saved = room / "cache", room / "saved"
        fill_elsewhere(set_name, str(folder), str(cache), str(saved), deterministic)
        return cache, saved

    return made


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[Any]:
    with open_llm(folder, deterministic=True) as llm:
        return answer(llm)


@pytest.mark.parametrize(("here", "num_loaded"), [(True, 200), (False, 0)], ids=["same", "other"])
def test_a_prefix_cache_is_of_one_instruction_set(
    folder: Path, elsewhere: Any, alone: list[Any], here: bool, num_loaded: int
) -> None:
    cache, _ = elsewhere(isa() if here else "generic", True)
    with open_llm(folder, deterministic=True, prefix_cache_dir=cache) as llm:
        assert answer(llm) == alone
        loaded = llm.metrics["loaded_tokens"]
        assert loaded >= num_loaded if here else loaded == 0


def test_without_the_option_a_prefix_cache_is_shared(folder: Path, elsewhere: Any) -> None:
    cache, _ = elsewhere("generic", False)
    with open_llm(folder, prefix_cache_dir=cache) as llm:
        answer(llm)
        assert llm.metrics["loaded_tokens"] >= 200


def continued(llm: LLM, saved: Path) -> list[str]:
    branch = llm.load_branch(saved)
    branch.truncate(len(PROMPT))
    branch.generate(SamplingParams(temperature=0, max_tokens=8, logprobs=1)).result()
    return [p.hex() for p in branch.logprobs[len(PROMPT) :]]


@pytest.mark.parametrize(
    ("set_name", "deterministic", "reason"),
    [
        ("here", True, None),
        ("generic", True, "it is of: cotrt .* generic kernels"),
        ("here", False, "it does not say of which"),
    ],
    ids=["same", "other", "not-deterministic"],
)
def test_kv_of_a_saved_branch_is_computed_again_where_bits_may_differ(
    folder: Path,
    elsewhere: Any,
    alone: list[Any],
    set_name: str,
    deterministic: bool,
    reason: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The file loads in any case, and what is computed again is what is shared from then on."""
    _, saved = elsewhere(isa() if set_name == "here" else set_name, deterministic)
    with open_llm(folder, deterministic=True) as llm, caplog.at_level(logging.WARNING, "cotrt"):
        assert continued(llm, saved) == alone[1]
        computed = llm.metrics["prompt_tokens_computed"]
        assert answer(llm) == alone
    told = [r.getMessage() for r in caplog.records if "computed again" in r.getMessage()]
    if reason is None:
        assert not told and computed < 20
        return
    assert len(told) == 1 and computed >= len(PROMPT) - 1
    assert str(saved) in told[0]
    assert re.search(reason, told[0]) and f"{isa()} kernels" in told[0]


@pytest.mark.parametrize("deterministic", [True, False])
def test_without_the_option_kv_of_any_conditions_is_taken(
    folder: Path, elsewhere: Any, deterministic: bool, caplog: pytest.LogCaptureFixture
) -> None:
    _, saved = elsewhere("generic", deterministic)
    with open_llm(folder) as llm, caplog.at_level(logging.WARNING, "cotrt"):
        continued(llm, saved)
        assert llm.metrics["prompt_tokens_computed"] < 20
    assert not caplog.records
