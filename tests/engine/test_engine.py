"""The engine by hand: ends, cancels and prunes while a step is in flight, failures, draws."""

from __future__ import annotations

import gc
from concurrent.futures import CancelledError

import pytest
from engine_rig import Rig
from logged_model import logprob, probs

from cotrt.errors import (
    BranchBusyError,
    BranchPrunedError,
    EngineDeadError,
    KVCacheExhaustedError,
    NumericsError,
)
from cotrt.tree.schedule.step import Step

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def test_max_tokens_0_ends_at_once_and_computes_nothing() -> None:
    rig = Rig()
    branch = rig.root(PROMPT)
    state = rig.start(branch, max_tokens=0)
    assert state.promise.done
    assert (state.tokens, state.finish_reason) == ([], "length")
    rig.run()
    assert rig.model.num_rows == 0
    assert len(branch) == len(PROMPT)


def test_max_tokens_0_with_prompt_logprobs_scores_the_prompt_alone() -> None:
    rig = Rig()
    state = rig.start(rig.root(PROMPT), max_tokens=0, prompt_logprobs=2)
    rig.run()
    assert state.tokens == []
    for position in range(1, len(PROMPT)):
        expected = logprob(PROMPT[:position], PROMPT[position])
        assert state.prompt_scores[position].logprob == pytest.approx(expected, abs=1e-5)


def test_prompt_logprobs_are_the_same_on_a_cached_prefix_and_in_chunks() -> None:
    rig = Rig(max_num_batched_tokens=3)
    states = []
    for _ in range(2):
        states.append(rig.start(rig.root(PROMPT), max_tokens=2, prompt_logprobs=0))
        rig.run()
    first, second = ({p: s.logprob for p, s in x.prompt_scores.items()} for x in states)
    assert first == second
    assert len(first) == len(PROMPT) - 1


def test_a_branch_cancelled_in_flight_is_free_at_once_and_its_token_is_dropped() -> None:
    rig = Rig()
    branch = rig.root(PROMPT)
    state = rig.start(branch, max_tokens=20, ignore_eos=True)
    rig.step()
    rig.step()
    tokens = branch.token_ids

    def cancel() -> None:
        rig.engine.cancel(state)
        branch.extend([1, 1, 1])
        again.append(rig.start(branch, max_tokens=5, ignore_eos=True))

    again: list = []
    rig.model.in_flight.append(cancel)
    rig.step()
    assert state.finish_reason == "abort"
    assert state.tokens == tokens[len(PROMPT) :]
    rig.run()
    assert branch.token_ids[: len(tokens) + 3] == [*tokens, 1, 1, 1]
    assert again[0].tokens == rig.solo(again[0]).tokens


def test_a_branch_pruned_in_flight_raises_with_what_it_had() -> None:
    rig = Rig()
    root = rig.root(PROMPT)
    child = root.fork()[0]
    generation = child.generate(max_tokens=20, ignore_eos=True)
    rig.step()
    rig.step()
    rig.model.in_flight.append(root.prune)
    rig.step()
    with pytest.raises(BranchPrunedError) as caught:
        generation.result(timeout=0)
    output = caught.value.output
    assert output is not None
    assert len(output.token_ids) == 2
    path = list(PROMPT)
    total = 0.0
    for token in output.token_ids:
        total += logprob(path, token)
        path.append(token)
    assert output.cumulative_logprob == pytest.approx(total, abs=1e-4)
    rig.run()
    assert rig.tree.pool.num_in_use == 0
    for verb in (child.fork, lambda: child.extend([1]), lambda: child.generate()):
        with pytest.raises(BranchPrunedError):
            verb()


def test_a_fork_made_in_flight_has_the_published_tokens_and_goes_on_alone() -> None:
    rig = Rig()
    branch = rig.root(PROMPT)
    state = rig.start(branch, max_tokens=12, ignore_eos=True)
    rig.step()
    rig.step()
    made: list = []
    rig.model.in_flight.append(lambda: made.append(branch.fork()[0]))
    rig.step()
    child = made[0]
    assert len(child) == len(PROMPT) + 2
    other = rig.start(child, max_tokens=9, ignore_eos=True)
    rig.run()
    assert state.tokens == rig.solo(state).tokens
    assert other.tokens == rig.solo(other).tokens


def test_busy_branches_refuse_what_would_change_them() -> None:
    rig = Rig()
    branch = rig.root(PROMPT)
    state = rig.start(branch, max_tokens=5)
    for verb in (
        lambda: branch.extend([1]),
        lambda: branch.truncate(2),
        lambda: branch.generate(),
        lambda: branch.choose([[1], [2]]),
    ):
        with pytest.raises(BranchBusyError, match=r"g\.result\(\) or .*g\.cancel\(\)"):
            verb()
    rig.engine.cancel(state)
    branch.extend([1])


def test_a_score_in_flight_survives_changes_of_its_branch() -> None:
    rig = Rig(max_num_batched_tokens=4)
    branch = rig.root(PROMPT)
    handle = branch.score([[3, 3, 3], [3, 4, 5]], given=[7])
    rig.model.in_flight.append(lambda: branch.truncate(3).extend([11, 11]))
    rig.run()
    for score, option in zip(handle.result(timeout=0), ([3, 3, 3], [3, 4, 5]), strict=True):
        path = [*PROMPT, 7]
        for token, value in zip(option, score.logprobs, strict=True):
            assert value == pytest.approx(logprob(path, token), abs=1e-5)
            path.append(token)
    assert branch.token_ids == [1, 2, 3, 11, 11]


def test_a_failed_step_ends_the_requests_in_it_and_no_others() -> None:
    rig = Rig(max_num_seqs=1)
    first = rig.start(rig.root(PROMPT), max_tokens=4, ignore_eos=True)
    second = rig.start(rig.root(PROMPT[::-1]), max_tokens=4, ignore_eos=True)
    rig.step()
    rig.model.fail = RuntimeError("the device is gone")
    rig.step()
    assert isinstance(first.promise.error, RuntimeError)
    assert len(first.tokens) == len(first.logprobs) == 1
    rig.run()
    assert second.tokens == rig.solo(second).tokens
    again = rig.start(rig.root(PROMPT), max_tokens=4, ignore_eos=True, seed=3)
    rig.run()
    assert again.tokens == rig.solo(again).tokens


def test_a_score_that_takes_rows_of_anothers_failed_step_fails_with_it() -> None:
    rig = Rig(max_num_batched_tokens=4)
    branch = rig.root(PROMPT[:2])
    shared = [3, 4, 5, 6, 7]
    handle = branch.score([[*shared, 1, 1], [*shared, 2, 2]])
    rig.model.fail = RuntimeError("gone")
    rig.step()
    rig.run()
    with pytest.raises(RuntimeError, match="gone"):
        handle.result(timeout=0)
    again = branch.score([[*shared, 1, 1], [*shared, 2, 2]])
    rig.run()
    assert [len(score.logprobs) for score in again.result(timeout=0)] == [7, 7]


def test_kv_whose_copy_may_not_have_been_made_is_not_kept() -> None:
    rig = Rig()
    branch = rig.root(PROMPT)
    children = branch.fork(2)
    first = [rig.start(child, max_tokens=1) for child in children]
    rig.run()
    assert all(state.promise.done for state in first)
    again = [rig.start(child, max_tokens=3, ignore_eos=True) for child in children]
    copy_blocks = rig.model.copy_blocks

    def broken(pairs: object) -> None:
        rig.model.copy_blocks = copy_blocks  # type: ignore[method-assign]
        raise RuntimeError("no copy was made")

    rig.model.copy_blocks = broken  # type: ignore[method-assign]
    rig.step()
    assert all(isinstance(state.promise.error, RuntimeError) for state in again)
    rig.check()
    last = [rig.start(child, max_tokens=3, ignore_eos=True) for child in children]
    rig.run()
    for state in last:
        assert state.tokens == rig.solo(state).tokens


def test_rows_without_finite_logits_end_that_sequence_alone() -> None:
    def broken_after_4(path: list[int]) -> dict[int, float]:
        return {} if path[0] == 4 and len(path) > 12 else probs(path)

    rig = Rig(next_probs=broken_after_4)
    bad = rig.root([4, *PROMPT]).generate(max_tokens=8, ignore_eos=True)
    good = rig.start(rig.root(PROMPT), max_tokens=8, ignore_eos=True)
    rig.run()
    with pytest.raises(NumericsError) as caught:
        bad.result(timeout=0)
    assert caught.value.output is not None
    assert len(caught.value.output.token_ids) == 2
    assert good.tokens == rig.solo(good).tokens


def test_a_broken_law_ends_the_engine_and_every_waiter_hears_of_it() -> None:
    rig = Rig()
    states = [rig.start(rig.root([n, n]), max_tokens=9, ignore_eos=True) for n in range(1, 4)]
    rig.step()
    rig.scheduler.commit = None  # type: ignore[assignment,method-assign]
    with pytest.raises(TypeError):
        rig.engine.step()
    for state in states:
        assert isinstance(state.promise.error, EngineDeadError)
    assert rig.engine.step() is False


def test_a_request_that_can_never_fit_is_refused_with_the_numbers() -> None:
    rig = Rig(num_blocks=4, block_size=8)
    with pytest.raises(
        KVCacheExhaustedError, match=r"33 tokens need 5 KV blocks.*whole pool has 4"
    ):
        rig.runtime.check_length(33)
    branch = rig.root(PROMPT)
    with pytest.raises(KVCacheExhaustedError):
        branch.extend([1] * 30)
    assert len(branch) == len(PROMPT)
    with pytest.raises(KVCacheExhaustedError):
        branch.score([1] * 30)


def test_an_idle_engine_holds_nothing_of_the_step_that_it_ran_last() -> None:
    rig = Rig()
    branch = rig.root(PROMPT)
    state = rig.start(branch, max_tokens=20, ignore_eos=True)
    for _ in range(4):
        rig.step()
    rig.engine.cancel(state)
    rig.engine.scheduler.counters.count_tokens()  # of several steps together
    rig.last_step = None
    gc.collect()
    kept = [each for each in gc.get_objects() if type(each) is Step]
    assert [each for each in kept if any(work.data is state for work in each.draws)] == []


def test_a_cancelled_choose_leaves_its_branch_as_it_was() -> None:
    rig = Rig(max_num_batched_tokens=4)
    branch = rig.root(PROMPT)
    handle = branch.choose([[1, 1], [2, 2]])
    rig.step()
    rig.model.in_flight.append(handle.cancel)
    rig.step()
    with pytest.raises(CancelledError):
        handle.result(timeout=0)
    assert branch.token_ids == PROMPT
    rig.run()
    branch.prune()
    rig.check_empty()


def test_a_choose_leaves_the_kv_of_the_chosen_option_in_its_branch() -> None:
    rig = Rig()
    branch = rig.root(PROMPT)
    handle = branch.choose([[1, 1, 1], [2, 2, 2]], given=[5])
    rig.run()
    choice = handle.result(timeout=0)
    assert branch.token_ids == [*PROMPT, 5, *choice.option]
    assert branch.kv.computed_tokens == len(branch) - 1
    before = rig.model.num_rows
    rig.start(branch, max_tokens=1)
    rig.run()
    assert rig.model.num_rows == before + 1


def test_temporary_branches_of_scores_are_not_children() -> None:
    rig = Rig(max_num_batched_tokens=2)
    branch = rig.root(PROMPT)
    branch.score([[1], [2]])
    rig.step()
    assert len(branch.children) == 0
    assert branch.fork(2)[1].parent is branch
    assert len(branch.children) == 2


def test_forks_of_a_closed_branch_live_on_and_its_handle_can_be_had_again() -> None:
    rig = Rig()
    root = rig.root(PROMPT)
    rig.start(root, max_tokens=1)
    rig.run()
    child = root.fork()[0]
    number = root.id
    root.close()
    with pytest.raises(BranchPrunedError, match="closed"):
        root.fork()
    again = child.parent
    assert again is not None and again.id == number
    state = rig.start(again, max_tokens=4, ignore_eos=True)
    rig.run()
    assert state.tokens == rig.solo(state).tokens
    again.prune()
    rig.check_empty()


def test_generated_text_is_never_needed_for_plain_generation() -> None:
    """Text is made when somebody asks for it, and not in the steps."""
    rig = Rig(tokenizer=_NoDecode())
    state = rig.start(rig.root(PROMPT), max_tokens=5, ignore_eos=True)
    rig.run()
    assert len(state.tokens) == 5


class _NoDecode:
    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, ids: list[int]) -> str:
        raise AssertionError("decoded")


class _Raising:
    """Characters by id; decoding anything with a 7 in it raises."""

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, ids: list[int]) -> str:
        if 7 in ids:
            raise LookupError("7 has no text")
        return "".join(chr(97 + i) for i in ids)


def test_a_tokenizer_that_raises_ends_its_request_alone() -> None:
    def counting(path: list[int]) -> dict[int, float]:
        return {(path[-1] + 1) % 12 or 1: 1.0}

    rig = Rig(next_probs=counting, tokenizer=_Raising())
    watched = rig.start(rig.root([3]), max_tokens=9, stop=["zz"], temperature=0.0)
    stopped = rig.start(rig.root([1]), max_tokens=9, stop=["e"], temperature=0.0)
    silent = rig.start(rig.root([4]), max_tokens=9, temperature=0.0)
    rig.run()
    assert isinstance(watched.promise.error, LookupError) and watched.finish_reason == "abort"
    assert watched.tokens == [4, 5, 6, 7]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", "e")
    assert silent.tokens == [5, 6, 7, 8, 9, 10, 11, 1, 2]
