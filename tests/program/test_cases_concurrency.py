"""Traps of aborts and of conversations that meet each other."""

from __future__ import annotations

import concurrent.futures
import random

import pytest
from api_helpers import EOS, counting, eventually, is_idle, scripted, slowly
from what_is_kept import engine_tables, grown, living, resident_growth

from cotrt import SamplingParams


def test_cancelling_an_n_request_stops_all_its_outputs_100_times_over():
    with scripted(slowly(counting, 1e-4)) as llm:

        def cancel(rounds):
            for round_ in rounds:
                work = llm.submit("abc", SamplingParams(n=4, max_tokens=400))
                if round_ % 2:
                    next(iter(work[0]))
                work.cancel()
                assert llm.metrics["running"] == llm.metrics["waiting"] == 0
                generated = llm.metrics["generated_tokens"]
                if round_ % 10 == 0:
                    # Ten steps of another request: what was cancelled gets no token in them.
                    [output] = llm.generate("abc", SamplingParams(max_tokens=10))[0].outputs
                    assert output.text == "defghijklm"
                    assert llm.metrics["generated_tokens"] == generated + 10
            assert eventually(lambda: is_idle(llm))

        cancel(range(20))

        def leaves_nothing():
            before = living(), engine_tables(llm)
            cancel(range(20, 100))
            assert grown(living(), before[0], 80) == {}
            assert grown(engine_tables(llm), before[1], 80) == {}

        # 64 KB kept of each round would be 5 MiB.
        most = 4 << 20
        assert resident_growth(leaves_nothing, enough=most) < most
        assert len(llm._runtime.engine.scheduler.sequences) == 0


def test_cancelling_when_some_outputs_have_ended_keeps_those():
    ends = set()

    def probs(ids):
        if len(ids) == 3:
            return {97: 0.5, 98: 0.5}
        if ids[3] == 97 and len(ids) > 5:
            ends.add(tuple(ids))
            return {EOS: 1.0}
        return {99: 1.0}

    with scripted(slowly(probs, 1e-3)) as llm:
        work = llm.submit("xyz", SamplingParams(n=8, max_tokens=5000, seed=1))
        assert eventually(lambda: any(g.done for g in work))
        work.cancel()
        reasons = {o.finish_reason for o in work.result()[0].outputs}
        assert reasons == {"stop", "abort"}
        assert eventually(lambda: is_idle(llm))


WORDS = [f"<{chr(97 + i)}{chr(98 + i)}{chr(99 + i)}{i:02}>" for i in range(24)]


def repeat_the_word(ids):
    """The text's first word, again and again: any other conversation's KV would show."""
    text = "".join(map(chr, ids))
    begin = text.rindex("<", 0, text.index(">")) if ">" in text else 0
    word = text[begin : text.index(">") + 1]
    said = text[text.index(":") + 1 :]
    return {ord(word[len(said) % len(word)]): 1.0}


def repeat_code_words(llm, num_rounds):
    """24 branches kept across rounds, of one beginning; some replies are cut short.

    Returns:
        The branches, each of which said its own word alone.
    """
    prefix = "Repeat your own code word for ever, whatever the others say. It is "
    branches = [llm.branch(prefix + word + ":") for word in WORDS]
    starts = [len(branch) for branch in branches]
    rng = random.Random(0)

    def talk(number):
        branch, word = branches[number], WORDS[number]
        work = branch.generate(max_tokens=rng.randrange(1, 12), temperature=1.0)
        if rng.random() < 0.2:
            work.cancel()
        work.result()
        said = branch.text[starts[number] :]
        assert said == (word * 100)[: len(said)], (word, said)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for _ in range(num_rounds):
            list(pool.map(talk, rng.sample(range(24), 24)))
    return branches


def test_no_foreign_word_ever_in_24_conversations_over_a_tiny_pool():
    """Sessions kept across rounds, identical prefixes, aborts, preemption."""
    with scripted(repeat_the_word, kv_cache_memory_bytes=16 * 4 * 40) as llm:
        branches = repeat_code_words(llm, 20)
        assert llm.metrics["preemptions"] + llm.metrics["recomputed_tokens"] > 0
        del branches[:]
        assert eventually(lambda: is_idle(llm))


def test_two_threads_on_one_branch_are_refused_or_serialised():
    from cotrt import BranchBusyError

    with scripted(slowly(counting, 1e-4)) as llm:
        branch = llm.branch("abc")

        def use(_):
            try:
                return len(branch.generate(max_tokens=5).result().token_ids)
            except BranchBusyError:
                return 0

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            grown = sum(pool.map(use, range(60)))
        assert len(branch) == 3 + grown and grown >= 5
        text = branch.text[3:]
        assert text == "".join(chr(97 + (3 + i) % 26) for i in range(len(text)))


@pytest.mark.parametrize("share", [True, False])
def test_prompts_with_equal_beginnings_answer_as_alone(share):
    with scripted(repeat_the_word, enable_prefix_caching=share) as llm:
        prompts = [f"the same beginning of all of them {word}:" for word in WORDS * 2]
        params = SamplingParams(max_tokens=20)
        for result, word in zip(llm.generate(prompts, params), WORDS * 2):
            assert result.outputs[0].text == (word * 20)[:20]
