"""Handles in blocking code: results, timeouts, iteration, cancelling, errors."""

from __future__ import annotations

import concurrent.futures
import copy
import pickle
import threading

import pytest
from api_helpers import Gate, Nan, counting, eventually, is_idle, letters, scripted

from cotrt import (
    BranchBusyError,
    BranchPrunedError,
    EngineDeadError,
    InvalidRequestError,
    NumericsError,
    SamplingParams,
)


def test_work_starts_when_the_handle_is_made():
    with scripted() as llm:
        branch = llm.branch("a")
        branch.generate(max_tokens=5)  # the handle is dropped
        assert eventually(lambda: len(branch) == 6)


def test_result_can_be_asked_for_again_and_by_several_threads():
    with scripted() as llm:
        handle = llm.branch("a").generate(max_tokens=40)
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            texts = {f.result().text for f in [pool.submit(handle.result) for _ in range(8)]}
        assert texts == {handle.result().text}
        assert handle.done and len(handle.result().token_ids) == 40


def test_timeout_leaves_the_work_running():
    gate = Gate()
    gate.shut()
    with scripted(gate) as llm:
        branch = llm.branch("a")
        handle = branch.generate(max_tokens=3)
        for seconds in (0, 0.01):
            with pytest.raises(TimeoutError, match="runs on"):
                handle.result(timeout=seconds)
        assert not handle.done
        gate.open.set()
        assert len(handle.result(timeout=1e9).token_ids) == 3


def test_iteration_gives_every_token_once_and_starts_at_the_first_each_time():
    with scripted() as llm:
        generation = llm.branch("a").generate(max_tokens=30)
        live, again = list(generation), list(generation)
        for chunks in (live, again):
            assert [i for chunk in chunks for i in chunk.token_ids] == generation.result().token_ids
            assert "".join(chunk.text for chunk in chunks) == generation.result().text
            assert all(len(c.token_ids) == len(c.logprobs) for c in chunks)
        assert len(again) == 1


def test_break_does_not_stop_the_work_and_an_iterator_goes_on_later():
    with scripted() as llm:
        generation = llm.branch("a").generate(max_tokens=30)
        chunks = iter(generation)
        first = next(chunks)
        for _ in generation:
            break
        assert len(generation.result().token_ids) == 30
        rest = list(chunks)
        assert first.text + "".join(c.text for c in rest) == generation.result().text
        assert list(chunks) == []


def test_a_closed_gate_and_two_readers_of_one_generation():
    gate = Gate()
    with scripted(gate) as llm:
        generation = llm.branch("a").generate(max_tokens=50)
        texts: list[str] = []
        threads = [
            threading.Thread(target=lambda: texts.append("".join(c.text for c in generation)))
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert texts == [generation.result().text] * 3


def test_with_cancels_on_leaving_and_the_branch_keeps_its_tokens():
    with scripted(counting) as llm:
        branch = llm.branch("a")
        with branch.generate(max_tokens=100_000) as generation:
            for _ in generation:
                break
        output = generation.result()
        assert output.finish_reason == "abort" and output.stop_reason is None
        assert output.token_ids == branch.token_ids[1:] and output.token_ids
        branch.extend("more")  # it is free


def test_cancel_frees_the_branch_and_fences_the_step_in_flight():
    gate = Gate()
    with scripted(gate) as llm:
        branch = llm.branch("a")
        generation = branch.generate(max_tokens=100)
        next(iter(generation))
        gate.shut()
        assert gate.reached.wait(20)
        generation.cancel()
        length = len(branch)
        branch.extend("xyz")
        assert generation.done and generation.result().finish_reason == "abort"
        gate.open.set()
        other = branch.generate(max_tokens=4).result()
        assert len(branch) == length + 3 + 4 and branch.text[length:].startswith("xyz")
        assert other.text == branch.text[-4:]
        generation.cancel()  # a handle that is done stays as it is
        assert generation.result().finish_reason == "abort"


def test_cancel_before_the_first_step_gives_an_empty_abort():
    gate = Gate()
    gate.shut()
    with scripted(gate) as llm:
        generation = llm.branch("a").generate(max_tokens=5)
        generation.cancel()
        assert list(generation) == []
        output = generation.result()
        assert (output.text, output.token_ids, output.finish_reason) == ("", [], "abort")
        gate.open.set()


def test_a_score_that_was_cancelled_says_so():
    gate = Gate()
    gate.shut()
    with scripted(gate) as llm:
        branch = llm.branch("a")
        score, choice = branch.score("b"), branch.choose(["b", "c"])
        score.cancel()
        choice.cancel()
        for handle in (score, choice):
            assert handle.done
            with pytest.raises(concurrent.futures.CancelledError):
                handle.result()
        assert branch.text == "a"
        branch.extend("b")
        gate.open.set()


def test_prune_ends_the_generation_with_an_error_that_carries_what_came():
    with scripted() as llm:
        branch = llm.branch("a")
        generation = branch.generate(max_tokens=100_000)
        chunks = iter(generation)
        first = next(chunks)
        branch.prune()
        with pytest.raises(BranchPrunedError) as caught:
            generation.result()
        output = caught.value.output
        assert output.token_ids[: len(first.token_ids)] == first.token_ids
        assert output.text.startswith(first.text) and output.finish_reason == "abort"
        assert output.cumulative_logprob < 0
        seen = [first]
        with pytest.raises(BranchPrunedError):
            seen.extend(chunks)
        assert [i for c in seen for i in c.token_ids] == output.token_ids
        assert sum(len(c.logprobs) for c in seen) == len(output.token_ids)
        with pytest.raises(BranchPrunedError):
            branch.generate()
        assert eventually(lambda: is_idle(llm))


def test_busy_branch_refuses_what_would_change_it_and_says_what_to_do():
    gate = Gate()
    gate.shut()
    with scripted(gate) as llm:
        branch = llm.branch("a")
        handle = branch.generate(max_tokens=5)
        calls = [
            lambda: branch.extend("b"),
            lambda: branch.truncate(0),
            lambda: branch.generate(),
            lambda: branch.choose(["a", "b"]),
            lambda: llm.generate(branch),
        ]
        for call in calls:
            with pytest.raises(BranchBusyError, match=r"g\.result\(\).*g\.cancel\(\)"):
                call()
        child = branch.fork()[0]
        score = branch.score("b")
        gate.open.set()
        handle.result()
        score.result()
        assert child.text == "a"


def test_generations_are_a_sequence_and_one_handle():
    with scripted() as llm:
        generations = llm.branch("a").fork(3).generate(max_tokens=6)
        assert len(generations) == 3 and generations[-1] is list(generations)[2]
        assert generations[1:] == list(generations)[1:]
        outputs = generations.result()
        assert [g.result() for g in generations] == outputs


def test_one_failed_generation_raises_after_the_rest_with_their_outputs():
    def probs(ids):
        return {98: Nan()} if ids[0] == ord("!") and len(ids) > 3 else letters(ids)

    with scripted(probs) as llm:
        good, bad = llm.branch("ab"), llm.branch("!b")
        from cotrt import Branches

        handle = Branches([good, bad]).generate(max_tokens=10)
        with pytest.raises(NumericsError) as caught:
            handle.result()
        first, second = caught.value.outputs
        assert len(first.token_ids) == 10 and second is None
        assert len(caught.value.output.token_ids) == 2
        assert handle[0].result() == first
        bad.truncate(2)
        assert bad.text == "!b"


def test_a_failing_model_ends_what_was_in_its_step_and_nothing_else():
    def probs(ids):
        if ids[0] == ord("!"):
            raise ArithmeticError("no such number")
        return counting(ids)

    with scripted(probs) as llm:
        with pytest.raises(ArithmeticError, match="no such number"):
            llm.branch("!").generate(max_tokens=3).result()
        assert len(llm.branch("a").generate(max_tokens=3).result().token_ids) == 3


def test_errors_of_several_waiters_are_their_own():
    gate = Gate()
    gate.shut()
    llm = scripted(gate)
    handles = [llm.submit(["a", "b"], SamplingParams(max_tokens=5)) for _ in range(3)]
    gate.open.set()
    done = handles[0].result()
    gate.shut()
    more = [llm.submit(["c", "d"], SamplingParams(max_tokens=500_000)) for _ in range(3)]
    threading.Timer(0.05, gate.open.set).start()
    llm.close()
    errors = []
    for handle in more:
        with pytest.raises(EngineDeadError, match="closed") as caught:
            handle.result()
        errors.append(caught.value)
    assert len({id(error) for error in errors}) == 3
    assert all(error.outputs == [None, None] for error in errors)
    assert handles[0].result() == done  # what was done before stays


def test_calls_after_close_are_refused():
    llm = scripted()
    branch = llm.branch("a")
    llm.close()
    llm.close()
    calls = [
        lambda: llm.generate("a"),
        lambda: llm.branch("a"),
        lambda: branch.fork(),
        lambda: branch.extend("b"),
        lambda: branch.generate(),
        lambda: branch.score("b"),
        lambda: branch.choose(["b", "c"]),
        lambda: llm.memory(),
        lambda: llm.start_chat(chat_template="{{ messages }}"),
    ]
    for call in calls:
        with pytest.raises(EngineDeadError, match="closed"):
            call()
    assert branch.text == "a" and branch.token_ids == [97]
    branch.prune()


def test_a_handle_of_nothing_is_done():
    with scripted() as llm:
        from cotrt import Branches

        assert llm.generate([]) == []
        none = Branches([])
        assert none.generate().result() == [] and none.generate().done
        assert none.score(" Yes").result() == []
        assert none.extend("x") is none and len(none.fork(2)) == 0


def test_branches_of_two_models_do_not_mix():
    with scripted() as one, scripted() as other:
        from cotrt import Branches

        mixed = Branches([one.branch("a"), other.branch("a")])
        for call in (
            lambda: mixed.generate(max_tokens=1),
            lambda: mixed.score("b"),
            lambda: mixed.choose(["a", "b"]),
            lambda: mixed.extend("b"),
            lambda: one.generate(mixed[1]),
        ):
            with pytest.raises(InvalidRequestError, match="another LLM"):
                call()


def test_batches_are_all_or_nothing():
    with scripted(max_model_len=20) as llm:
        from cotrt import Branches

        short, long = llm.branch("a"), llm.branch("a" * 18)
        both = Branches([short, long])
        with pytest.raises(InvalidRequestError):
            both.extend("bcd")
        with pytest.raises(InvalidRequestError):
            both.truncate(5)
        with pytest.raises(InvalidRequestError, match="twice"):
            Branches([short, short]).generate(max_tokens=2)
        with pytest.raises(InvalidRequestError, match="twice"):
            Branches([short, short]).choose(["x", "y"])
        assert (len(short), len(long)) == (1, 18)
        both.extend(["b", "c"])
        assert short.text == "ab" and long.text.endswith("ac")


def test_handles_branches_and_models_refuse_to_be_pickled_and_say_what_to_do():
    with scripted() as llm:
        branch = llm.branch("a")
        chat = llm.start_chat(chat_template="{{ messages[-1].content }}")
        for thing, hint in (
            (llm, "one in each process"),
            (branch, "token_ids"),
            (branch.fork(2), "token_ids"),
            (branch.score("b"), "result"),
            (llm.submit("a"), "result"),
            (chat, "messages"),
        ):
            with pytest.raises(TypeError, match=hint):
                pickle.dumps(thing)
            if thing is not chat:
                with pytest.raises(TypeError):
                    copy.deepcopy(thing)
        output = llm.generate("a", SamplingParams(max_tokens=2, logprobs=1))[0]
        assert pickle.loads(pickle.dumps(output)) == output
