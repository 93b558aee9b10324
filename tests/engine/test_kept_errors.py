"""Whoever keeps the error of a request does not keep its sequence, or what its step computed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from typing import Any

import pytest
from engine_rig import Rig
from late_device import LateRig

from cotrt.engine.model_runner import Pending


def _raises(path: list[int]) -> Mapping[int, float]:
    if len(path) > 4:
        raise ZeroDivisionError("made to fail: the weights")
    return {1: 1.0}


def _start(rig: Any) -> tuple[Any, Any]:
    """The promise of a generate, and its sequence, of which nobody keeps a handle."""
    branch = rig.root([1, 2, 3])
    promise = rig.start(branch, max_tokens=30).promise
    return promise, weakref.ref(branch._seq)


def _is_gone(rig: Any, seq: Any) -> bool:
    rig.last_step = None
    assert rig.metrics  # which lets go of the steps that it counts
    gc.collect()
    return seq() is None


def test_the_error_of_a_function() -> None:
    rig = Rig(next_probs=_raises)
    promise, seq = _start(rig)
    rig.run()
    assert isinstance(promise.error, ZeroDivisionError)
    assert _is_gone(rig, seq)


@pytest.mark.parametrize("late", [False, True])
def test_the_error_of_a_step(late: bool) -> None:
    """At its launch, or on a device that runs behind, with another step launched after it."""
    rig = LateRig()
    rig.model.fails_late = late
    launch, steps = rig.model.run, []

    def run(*arguments: Any) -> Any:
        steps.append(arguments[0])
        if len(steps) == 4:
            rig.model.fail = RuntimeError("made to fail")
        return launch(*arguments)

    rig.model.run = run
    promise, seq = _start(rig)
    rig.run()
    assert isinstance(promise.error, RuntimeError)
    rig.model.runs.clear()
    assert _is_gone(rig, seq)


def test_steps_that_ran_ahead_are_let_go_one_by_one() -> None:
    """A step must not hold the step whose draws it took, which holds the one before that."""
    rig = LateRig(max_model_len=400)
    branch = rig.root([1, 2, 3])
    rig.start(branch, max_tokens=200, ignore_eos=True)
    num_ahead = 0
    for _ in range(40):
        rig.step()
        num_ahead += rig.ahead is not None
    assert num_ahead > 20
    rig.model.runs.clear()
    gc.collect()
    assert sum(type(each) is Pending for each in gc.get_objects()) <= 3
