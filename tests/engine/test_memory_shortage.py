"""A step that the device has no memory for is made smaller; then its newest request goes."""

from __future__ import annotations

import pytest
import torch
from engine_rig import Rig
from logged_model import logprob

from cotrt.engine.memory_shortage import is_out_of_memory
from cotrt.tree.schedule.step_limit import StepLimit

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def start_some(rig: Rig, count: int, **fields: object) -> list:
    roots = [rig.root([*PROMPT, 1 + i // 8, 1 + i % 8]) for i in range(count)]
    fields = {"max_tokens": 12, "ignore_eos": True, **fields}
    return [rig.start(root, **fields) for root in roots]


@pytest.mark.parametrize("room", [1, 2, 3, 7, 11])
def test_steps_become_as_small_as_they_have_to_be_and_nobody_notices(room: int) -> None:
    rig = Rig()
    states = start_some(rig, 6, prompt_logprobs=0)
    rig.model.room = room
    rig.run()
    assert rig.model.num_shortages > 0
    for state in states:
        twin = rig.solo(state)
        assert state.promise.error is None
        assert (state.tokens, state.finish_reason) == (twin.tokens, "length")
        assert sorted(state.prompt_scores) == list(range(1, len(PROMPT) + 2))
    assert rig.metrics["recomputed_tokens"] == 0


def test_a_decode_step_of_many_rows_is_halved_too() -> None:
    rig = Rig()
    states = start_some(rig, 16, max_tokens=40)
    for _ in range(5):
        rig.step()
    rig.model.room = 5
    rig.run()
    assert 2 <= rig.model.num_shortages <= 4  # 16 rows, 8 rows; 4 go well, and then 8 once more
    assert all(state.tokens == rig.solo(state).tokens for state in states)


def test_the_limit_comes_back_when_there_is_memory_again() -> None:
    rig = Rig(max_num_batched_tokens=64)
    start_some(rig, 1, max_tokens=300)
    rig.model.room = 3
    rig.step()
    rig.step()
    assert rig.scheduler.limit.tokens == 6 // 2
    rig.model.room = None
    rig.run()
    assert rig.scheduler.limit.tokens == 64


def test_a_shortage_that_stays_costs_ever_fewer_failed_steps() -> None:
    limit, failed = StepLimit(64), 0
    for _ in range(10_000):
        if limit.tokens > 10:
            failed += 1
            assert limit.halve(limit.tokens)
        else:
            limit.note_success()
    assert failed < 15


def test_where_one_token_does_not_fit_the_requests_end_one_by_one_and_the_engine_goes_on() -> None:
    rig = Rig()
    states = start_some(rig, 3)
    rig.model.room = 0
    rig.run()
    for state in states:
        assert isinstance(state.promise.error, MemoryError)
        assert "no memory for a step of one token" in str(state.promise.error)
        assert isinstance(state.promise.error.__cause__, torch.OutOfMemoryError)
    rig.model.room = None
    (again,) = start_some(rig, 1)
    rig.run()
    assert again.tokens == rig.solo(again).tokens


@pytest.mark.parametrize("num_steps", [0, 3])
@pytest.mark.parametrize("num_ended", [1, 2])
def test_the_newest_end_first_and_the_others_go_on(num_steps: int, num_ended: int) -> None:
    rig = Rig()
    states = start_some(rig, 4)
    states.append(rig.start(rig.root([*PROMPT, 9]), max_tokens=12, ignore_eos=True, priority=-1))
    for _ in range(num_steps):
        rig.step()
    rig.model.room = 0
    while sum(state.promise.error is not None for state in states) < num_ended:
        rig.step()
    rig.model.room = None
    rig.run()
    assert [s.promise.error is not None for s in states] == [i >= 5 - num_ended for i in range(5)]
    assert rig.metrics["recomputed_tokens"] == 0
    for state in states[: 5 - num_ended]:
        assert state.tokens == rig.solo(state).tokens


def test_one_that_ends_while_it_is_tried_costs_nobody_else_anything() -> None:
    rig = Rig()
    states = start_some(rig, 4)
    rig.model.room = 0
    while rig.scheduler.only is None:
        rig.step()
    rig.engine.cancel(states[3])
    rig.model.room = None
    rig.run()
    assert [state.finish_reason for state in states] == ["length"] * 3 + ["abort"]
    assert rig.scheduler.only is None


@pytest.mark.parametrize("first", [False, True])
def test_one_request_that_never_fits_ends_alone(first: bool) -> None:
    rig = Rig(max_num_seqs=8)
    good = [] if first else start_some(rig, 3)
    greedy = rig.start(rig.root([5] * 40), max_tokens=3)
    good = good or start_some(rig, 3)
    run = rig.model.run

    def run_or_not(step):
        if (step.input_ids == 5).sum() > 2 or (step.positions > 30).any():
            raise MemoryError("made to fail: too greedy")
        return run(step)

    rig.model.run = run_or_not
    rig.run()
    assert isinstance(greedy.promise.error, MemoryError)
    assert all(state.tokens == rig.solo(state).tokens for state in good)


def test_a_copy_that_was_not_made_is_made_again() -> None:
    rig = Rig()
    root = rig.root(PROMPT)
    first = rig.start(root, max_tokens=1)
    rig.run()
    children = root.fork(3)
    rig.model.no_room_to_copy = True
    states = [rig.start(child, max_tokens=9, ignore_eos=True) for child in children]
    rig.run()
    assert rig.model.num_shortages == 1 and first.promise.error is None
    assert all(state.tokens == rig.solo(state).tokens for state in states)


def test_works_that_end_while_the_step_fails_stay_ended() -> None:
    rig = Rig()
    states = start_some(rig, 4)
    rig.model.room = 2
    rig.model.in_flight.append(lambda: rig.engine.cancel(states[1]))
    rig.model.in_flight.append(lambda: rig.engine.table.prune(states[2].seq))
    rig.run()
    assert states[1].finish_reason == "abort" and states[2].promise.error is not None
    for state in (states[0], states[3]):
        assert state.tokens == rig.solo(state).tokens


def test_scores_and_followers_lose_nothing() -> None:
    """Logits that a failed step was to bring are asked for again, by each that wanted them."""
    rig = Rig()
    root = rig.root(PROMPT)
    scores = root.score([[1, 2, 3], [1, 2, 4], [2]])
    twins = [rig.start(rig.root(PROMPT), max_tokens=5, seed=i) for i in range(3)]
    rig.model.room = 4
    rig.run()
    assert rig.model.num_shortages > 0
    for score in scores.result(timeout=0):
        path = list(PROMPT)
        for token, value in zip(score.token_ids, score.logprobs, strict=True):
            assert value == pytest.approx(logprob(path, token), abs=1e-4)
            path.append(token)
    assert all(state.tokens == rig.solo(state).tokens for state in twins)
    assert rig.metrics["recomputed_tokens"] == 1  # one token is, in an engine with room too


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_counts_as_a_shortage(error: Exception, is_one: bool) -> None:
    assert is_out_of_memory(error) == is_one
