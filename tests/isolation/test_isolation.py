"""A test that fails does not fail the tests after it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# Run by a pytest of its own.
TESTS = '''
import pytest
from isolation import shared_fixture

from cotrt import LLM
from cotrt.testing import ScriptedModel

opened, in_use_at_close = [], []


@pytest.fixture(scope="module")
def model():
    return ScriptedModel(lambda ids: {97: 1.0}, vocab_size=128, eos_token_id=0)


@shared_fixture()
def llm(model):
    """An engine."""
    with LLM(model, kv_cache_memory_bytes=1 << 16) as made:
        opened.append(made)
        yield made
        in_use_at_close.append(made.memory().in_use)


@pytest.fixture(scope="module")
def kept(model):
    """One that nothing makes anew."""
    with LLM(model, kv_cache_memory_bytes=1 << 16) as made:
        yield made


def hold_a_branch(llm):
    branch = llm.branch("a frame of the test holds this one")
    branch.generate(max_tokens=3).result()
    try:
        another = llm.branch("and a frame of what the error came from this one")
        assert llm.memory().in_use == 0
    except AssertionError as error:
        raise ValueError("another") from error


def test_first(llm, kept):
    assert llm is opened[0] and llm.memory().in_use == 0


def test_fails(llm, kept):
    assert llm is opened[0]
    hold_a_branch(llm)


def test_fails_beside_an_engine_that_stays(kept):
    assert kept.memory().in_use == 0
    hold_a_branch(kept)


def test_next(llm, kept):
    assert llm is opened[1] and in_use_at_close == [0]
    assert llm.memory().in_use == kept.memory().in_use == 0


@pytest.fixture
def nothing_held(llm):
    yield
    assert llm.memory().in_use == 0


def test_fails_at_its_end(llm, nothing_held):
    llm.never_pruned = llm.branch("held by the engine itself")
    llm.never_pruned.generate(max_tokens=3).result()


def test_after_it(llm, nothing_held):
    assert llm is opened[2] and len(opened) == 3


@shared_fixture()
def asks_for_too_much(tmp_path):
    yield tmp_path


def test_the_first_may(asks_for_too_much):
    assert asks_for_too_much.is_dir()


def test_fails_the_second_may_not(asks_for_too_much):
    """Its folder would be that of the first."""
'''


def test_a_failed_test_leaves_nothing_to_the_tests_after_it(
    tmp_path: Path, repository: Path
) -> None:
    (tmp_path / "test_shared.py").write_text(TESTS)
    paths = [str(repository), str(Path(__file__).parent)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "isolation", "-p", "no:cacheprovider", "-rA", "-q"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    ends = {"PASSED": set(), "FAILED": set(), "ERROR": set()}
    for line in done.stdout.splitlines():
        if (words := line.split()) and words[0] in ends:
            ends[words[0]].add(line.split("::")[1].split()[0])
    assert ends["FAILED"] == {"test_fails", "test_fails_beside_an_engine_that_stays"}, done.stdout
    errors = {"test_fails_at_its_end", "test_fails_the_second_may_not"}
    assert ends["ERROR"] == errors, done.stdout
    # A test that errs at its end has passed before.
    right = {"test_first", "test_next", "test_after_it", "test_the_first_may"}
    assert ends["PASSED"] == right | {"test_fails_at_its_end"}, done.stdout
