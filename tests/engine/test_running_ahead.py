"""The engine a step ahead of its device: what must not differ, and each fence by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from engine_rig import Rig
from late_device import LateRig, random_pace
from logged_model import EOS

from cotrt.engine.records.record_stores import TierOptions
from cotrt.engine.state import GenerationState
from cotrt.errors import BranchPrunedError, EngineDeadError, NumericsError

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def two_ahead(rig: LateRig, **fields: Any) -> tuple[Any, GenerationState]:
    """A branch that decodes, with one step's result unread and the next one launched behind it."""
    branch = rig.root(PROMPT)
    state = rig.start(branch, **{"max_tokens": 40, "ignore_eos": True, "seed": 3, **fields})
    while rig.ahead is None:
        rig.step()
    return branch, state


def in_flight(rig: LateRig, verb: Callable[[], Any]) -> Any:
    """`verb` while the host waits for a step and another is launched behind it."""
    done = []

    def act() -> None:
        assert rig.ahead is not None
        done.append(verb())

    rig.model.in_flight.append(act)
    rig.step()
    assert done
    return done[0]


def program(rig: Rig) -> list[GenerationState]:
    """Branches of all ends and lengths, forks of forks, segment after segment."""
    root = rig.root(PROMPT)
    rig.start(root, max_tokens=3, temperature=0.0)
    rig.run()
    states = []
    branches = [*root.fork(5), *(b for f in root.fork(2) for b in f.fork(2))]
    for number, branch in enumerate(branches):
        fields: dict[str, Any] = {"max_tokens": 5 + 7 * number, "ignore_eos": number % 2 == 0}
        if number == 3:
            fields["stop_token_ids"] = [3, 5]
        if number == 4:
            fields["stop"] = [chr(7)]
        if number == 5:
            fields |= {"top_k": 3, "top_p": 0.8}
        states.append(rig.start(branch, **fields))
    rig.run()
    branches[0].truncate(len(branches[0]) - 2)
    branches[0].extend([1, 2, 3])
    for branch in branches[:4]:
        states.append(rig.start(branch, max_tokens=20))
    rig.run()
    return states


@pytest.mark.parametrize("pace", [0, 1, 2, 4])
def test_tokens_logprobs_and_counters_are_those_of_one_step_at_a_time(pace: int) -> None:
    rig, plain = LateRig(pace=random_pace(pace)), Rig()
    for state, twin in zip(program(rig), program(plain), strict=True):
        assert state.tokens == twin.tokens
        assert state.logprobs == pytest.approx(twin.logprobs, abs=1e-6)
        assert (state.finish_reason, state.stop_reason) == (twin.finish_reason, twin.stop_reason)
    assert rig.metrics == plain.metrics
    assert rig.model.num_ahead > 0.6 * rig.metrics["steps"]
    assert rig.fences["dropped"]


def test_a_step_is_launched_before_the_result_of_the_one_before_is_read() -> None:
    rig = LateRig()
    branch, _ = two_ahead(rig)
    assert rig.model.num_ahead == 1
    assert len(branch) == len(PROMPT) + 2  # of the prompt's step, and of the first decode
    for count in range(2, 12):
        rig.step()
        assert rig.model.num_ahead == count  # one launch a step, each ahead
        assert len(branch) == len(PROMPT) + 1 + count


def test_a_known_end_is_not_run_past() -> None:
    rig = LateRig()
    branch = rig.root(PROMPT)
    rig.start(branch, max_tokens=6, ignore_eos=True)
    rig.run()
    assert len(branch) == len(PROMPT) + 6
    assert len(rig.model.runs) == rig.metrics["steps"] == 6
    assert not rig.fences["dropped"]


def test_what_was_computed_past_an_end_of_sequence_is_dropped_and_not_counted() -> None:
    rig = LateRig()
    branch = rig.root(PROMPT)
    state = rig.start(branch, max_tokens=200, seed=1)
    rig.run()
    assert state.tokens[-1] == EOS and state.tokens == rig.solo(state).tokens
    assert rig.fences["all dropped"] == 1
    assert len(rig.model.runs) == rig.metrics["steps"] + 1
    again = rig.start(branch, max_tokens=30, seed=2, ignore_eos=True)
    rig.run()
    assert again.tokens == rig.solo(again).tokens
    assert rig.metrics["recomputed_tokens"] == 0


def test_a_fork_under_two_writes_in_flight_shares_what_is_published() -> None:
    rig = LateRig()
    branch, state = two_ahead(rig)
    while len(branch) % 8 != 4:
        rig.step()
    child = in_flight(rig, lambda: branch.fork()[0])
    rig._shared.add(branch._seq.private[0])
    assert child.token_ids == branch.token_ids[: len(child)]
    other = rig.start(child, max_tokens=9, seed=5)
    rig.run()
    assert rig.fences["copy"] == 1
    assert state.tokens == rig.solo(state).tokens
    assert other.tokens == rig.solo(other).tokens


@pytest.mark.parametrize("offset", range(8))
def test_a_fork_at_each_place_of_a_block(offset: int) -> None:
    rig = LateRig()
    branch, state = two_ahead(rig)
    while len(branch) % 8 != offset:
        rig.step()
    child = in_flight(rig, lambda: branch.fork()[0])
    other = rig.start(child, max_tokens=9, seed=5)
    rig.run()
    for each in (state, other):
        assert each.tokens == rig.solo(each).tokens


def test_a_prune_under_two_steps_in_flight_frees_blocks_that_the_next_step_takes() -> None:
    rig = LateRig(num_blocks=6)
    branch, state = two_ahead(rig)
    in_flight(rig, branch.prune)
    assert isinstance(state.promise.error, BranchPrunedError)
    assert rig.fences["free"]
    other = rig.start(rig.root([4] * 30), max_tokens=8, ignore_eos=True)
    rig.run()
    assert rig.fences["reuse"]
    assert other.tokens == rig.solo(other).tokens


def test_cancel_truncate_and_extend_while_a_step_ahead_writes() -> None:
    rig = LateRig()
    branch, state = two_ahead(rig)

    def verb() -> GenerationState:
        rig.engine.cancel(state)
        branch.truncate(len(PROMPT) - 3)
        branch.extend([3, 2, 1])
        return rig.start(branch, max_tokens=20, ignore_eos=True)

    again = in_flight(rig, verb)
    rig.run()
    assert state.finish_reason == "abort"
    assert again.tokens == rig.solo(again).tokens
    assert branch.token_ids == [*PROMPT[:-3], 3, 2, 1, *again.tokens]


def test_a_block_is_exchanged_for_an_equal_one_while_a_step_ahead_reads_it() -> None:
    rig = LateRig()
    root = rig.root(PROMPT)
    rig.start(root, max_tokens=1, temperature=0.0)
    rig.run()
    # The same draws on both, so both fill the same block and seal it in the same step.
    states = [rig.start(b, max_tokens=20, seed=9, ignore_eos=True) for b in root.fork(2)]
    rig.run()
    assert states[0].tokens == states[1].tokens == rig.solo(states[0]).tokens
    assert rig.fences["free"]


def test_calls_between_steps_wait_for_what_is_in_flight_and_no_step_runs_ahead_of_them() -> None:
    rig = LateRig()
    _, state = two_ahead(rig)
    seen = []
    promise = in_flight(
        rig, lambda: rig.engine.when_between_steps(lambda: seen.append(rig.engine._in_flight))
    )
    assert not promise.done
    rig.step()
    assert promise.done and seen == [False] and rig.engine._flight is None
    rig.run()
    assert state.tokens == rig.solo(state).tokens


def test_work_that_comes_is_started_in_the_next_step_but_one() -> None:
    rig = LateRig()
    _, state = two_ahead(rig)
    other = in_flight(rig, lambda: rig.start(rig.root([5, 5]), max_tokens=9, seed=1))
    rig.step()  # lands the step that ran ahead
    assert rig.engine._flight is None
    rig.step()
    assert len(rig.last_step.entries) == 2
    rig.run()
    for each in (state, other):
        assert each.tokens == rig.solo(each).tokens


@pytest.mark.parametrize("late", [False, True])
def test_a_step_that_fails_ahead_ends_its_requests_with_the_tokens_before_it(late: bool) -> None:
    rig = LateRig()
    branch, state = two_ahead(rig)
    rig.model.fail, rig.model.fails_late = RuntimeError("made to fail"), late
    before = len(branch)
    rig.run()
    assert str(state.promise.error) == "made to fail"
    assert len(branch) == before + 1  # of the step that was in flight before it
    again = rig.start(branch, max_tokens=20, ignore_eos=True)
    rig.run()
    assert again.tokens == rig.solo(again).tokens


def test_a_step_that_fails_on_the_device_ends_with_the_one_behind_it() -> None:
    rig = LateRig()
    branch = rig.root(PROMPT)
    state = rig.start(branch, max_tokens=20, ignore_eos=True)
    rig.step()
    rig.step()  # the prompt's, landed
    rig.model.fail, rig.model.fails_late = RuntimeError("made to fail"), True
    rig.step()
    rig.step()
    assert rig.engine._flight is None and not rig.engine._in_flight
    assert str(state.promise.error) == "made to fail"
    assert len(branch) == len(PROMPT) + 1
    rig.model.device.run_all()
    rig.check()


def test_nan_logits_end_one_request_and_their_token_is_never_a_models_input() -> None:
    def probs(path: list[int]) -> dict[int, float]:
        if len(path) == 14 and path[0] == 9:
            raise ValueError("nothing to say")
        return {path[-1] % 11 + 1: 1.0}

    rig = LateRig()
    rig.model.next_probs = probs
    bad = rig.start(rig.root([9, 8, 7]), max_tokens=40)
    good = rig.start(rig.root([1, 2, 3]), max_tokens=40)
    rig.run()
    assert isinstance(bad.promise.error, NumericsError)
    assert len(bad.tokens) == 11
    assert good.finish_reason == "length"
    assert rig.fences["dropped"] == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": 0.5},
        {"logprobs": 2},
        {"min_tokens": 4, "stop_token_ids": [3]},
        {"repetition_penalty": 1.3},
    ],
)
def test_draws_that_need_the_host_wait_for_it(fields: dict[str, Any]) -> None:
    rig = LateRig()
    state = rig.start(rig.root(PROMPT), max_tokens=12, **fields)
    rig.run()
    assert rig.model.num_ahead == 0
    twin = rig.solo(state)
    assert state.tokens == twin.tokens
    assert [s.logprob for s in state.scores] == pytest.approx([s.logprob for s in twin.scores])


def test_a_full_pool_is_not_run_ahead_into() -> None:
    rig = LateRig(num_blocks=6)
    states = [rig.start(rig.root([n + 1] * 9), max_tokens=25, ignore_eos=True) for n in range(3)]
    rig.run()
    assert rig.metrics["preemptions"]
    assert rig.model.num_ahead
    for state in states:
        assert state.tokens == rig.solo(state).tokens


def test_records_are_taken_and_given_in_the_order_of_the_steps_in_flight() -> None:
    rig = LateRig(num_blocks=8, tiers=TierOptions(host_bytes=1 << 16, always="move"))
    branches = [rig.root([n + 1] * 9) for n in range(4)]
    for turn in range(3):
        states = [rig.start(b, max_tokens=9, ignore_eos=True, seed=turn) for b in branches]
        rig.run()
        for state in states:
            assert state.tokens == rig.solo(state).tokens
    assert rig.fences["store"] and rig.fences["load"] and rig.model.num_ahead


def test_a_record_is_found_when_its_step_is_through_and_is_what_the_block_held_before() -> None:
    """The step that stores a block gives it to another, whose rows write it."""
    rig = LateRig(num_blocks=4, tiers=TierOptions(host_bytes=1 << 16, always="move"))
    first = rig.root([1] * 17)
    rig.start(first, max_tokens=1, temperature=0.0)
    rig.run()
    records = rig.engine.records
    assert records is not None and records.num_host == 0
    other = rig.start(rig.root([2] * 25), max_tokens=1, temperature=0.0)
    while not (rig.last_step is not None and rig.last_step.plan.stores):
        rig.step()
    plan = rig.last_step.plan
    written = set((plan.slot_mapping // rig.tree.block_size).tolist())
    assert written & {block for block, _, _ in plan.stores}
    assert records.num_host == 0, "a record is found before it is there"
    rig.step()
    assert records.num_host == len(plan.stores)
    for _, key, count in plan.stores:
        record = records.host_copy(key)
        assert record is not None and record.view("int32").tolist()[:count] == [1] * count
    rig.run()
    assert other.tokens == rig.solo(other).tokens


def test_what_a_step_that_fails_has_stored_is_kept() -> None:
    rig = LateRig(num_blocks=4, tiers=TierOptions(host_bytes=1 << 16, always="move"))
    rig.start(rig.root([1] * 17), max_tokens=1, temperature=0.0)
    rig.run()
    rig.model.fails_late = True
    rig.model.fail = RuntimeError("made to fail")
    other = rig.start(rig.root([2] * 25), max_tokens=1, temperature=0.0)
    rig.run()
    assert isinstance(other.promise.error, RuntimeError)
    records = rig.engine.records
    assert records is not None and records.num_host == rig.tree.tiers.counters.stored_blocks > 0


def test_a_stopped_engine_lets_the_device_come_to_its_end() -> None:
    rig = LateRig()
    _, state = two_ahead(rig)
    rig.engine.stop("the LLM was closed")
    assert isinstance(state.promise.error, EngineDeadError)
    assert rig.engine.step() is False
    rig.engine.settle()
    assert not rig.model.device._queue or rig.engine._flight is None
