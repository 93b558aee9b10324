"""Small pools: everybody finishes with the same result, nothing leaks, "never" is said at once."""

from __future__ import annotations

import pytest
from api_helpers import eventually, letters, scripted
from test_reuse import tokens

from cotrt import (
    LLM,
    InvalidRequestError,
    KVCacheExhaustedError,
    PromptTooLongError,
    SamplingParams,
)
from cotrt.testing import ScriptedModel

BLOCK = 16 * 4  # bytes


def small_pool(num_blocks: int = 8) -> LLM:
    """A context of 512 tokens over a pool that holds fewer."""
    return LLM(
        ScriptedModel(letters, vocab_size=320, eos_token_id=0),
        kv_cache_memory_bytes=num_blocks * BLOCK,
        max_model_len=512,
    )


def test_24_branches_in_a_third_of_the_room_that_they_need() -> None:
    def program(num_blocks: int) -> tuple[list[list[int]], list[list[float | None]], int]:
        with scripted(kv_cache_memory_bytes=num_blocks * BLOCK) as llm:
            root = llm.branch(tokens(64))
            branches = root.fork(24)
            for number, branch in enumerate(branches):
                branch.extend(tokens(10 + number, seed=number))
            outs = branches.generate(max_tokens=90, ignore_eos=True).result()
            assert [out.finish_reason for out in outs] == ["length"] * 24
            found = [b.token_ids for b in branches]
            logprobs = [b.logprobs for b in branches]
            metrics = llm.metrics
            first = metrics["prompt_tokens_computed"] + metrics["generated_tokens_computed"]
            paths = {tuple(ids[:end]) for ids in found for end in range(1, len(ids))}
            assert first == len(paths)
            root.prune()
            memory = llm.memory()
            assert (memory.in_use, memory.free + memory.cached) == (0, num_blocks)
            return found, logprobs, metrics["preemptions"]

    needed = 4 + sum(-(-(10 + n + 90) // 16) for n in range(24))
    large, large_logprobs, none = program(2 * needed)
    small, small_logprobs, some = program(needed // 3)
    assert (large, large_logprobs) == (small, small_logprobs)
    assert none == 0 < some


def test_what_can_never_fit_is_refused_with_the_numbers_while_others_are_served() -> None:
    with small_pool() as llm:
        running = llm.submit(tokens(20), SamplingParams(max_tokens=60, ignore_eos=True))
        with pytest.raises(KVCacheExhaustedError, match=r"200 tokens need 13 .*pool has 8"):
            llm.generate(tokens(200), SamplingParams(max_tokens=4))
        with pytest.raises(PromptTooLongError, match="max_model_len"):
            llm.generate(tokens(600), SamplingParams(max_tokens=4))
        small = llm.generate(tokens(20, seed=1), SamplingParams(max_tokens=5, ignore_eos=True))
        assert len(small[0].outputs[0].token_ids) == 5
        assert len(running.result()[0].outputs[0].token_ids) == 60


def test_a_bad_prompt_among_good_ones_is_named_and_nothing_runs() -> None:
    with small_pool() as llm:
        with pytest.raises(KVCacheExhaustedError, match="prompt 1: "):
            llm.generate([tokens(20), tokens(200)], SamplingParams(max_tokens=4))
        assert (llm.metrics["steps"], llm.memory().in_use) == (0, 0)


def test_a_branch_that_alone_outgrows_the_pool_ends_with_kv_capacity() -> None:
    with small_pool() as llm:
        out = llm.generate(tokens(120), SamplingParams(max_tokens=300, ignore_eos=True))[0]
        one = out.outputs[0]
        assert (one.finish_reason, one.stop_reason) == ("length", "kv_capacity")
        assert len(one.token_ids) == 9  # 128 tokens of KV, and the token drawn from the last
        exact = llm.generate(tokens(120), SamplingParams(max_tokens=9, ignore_eos=True))[0]
        assert len(exact.outputs[0].token_ids) == 9
        assert (exact.outputs[0].finish_reason, exact.outputs[0].stop_reason) == ("length", None)
        assert len(llm.generate(tokens(16), SamplingParams(max_tokens=5, ignore_eos=True))) == 1


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("count", [2, 6])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(
            temperature=0.0, presence_penalty=0.6, logprobs=1, max_tokens=60, ignore_eos=True
        ),
        SamplingParams(temperature=0.8, seed=7, logprobs=1, max_tokens=60, ignore_eos=True),
    ],
    ids=["greedy", "seeded"],
)
def test_preempted_requests_go_on_as_if_they_had_been_alone(
    caching: bool, count: int, params: SamplingParams
) -> None:
    prompts = [tokens(40, seed=n) for n in range(count)]
    with scripted() as large:
        solo = [large.generate(prompt, params)[0].outputs[0] for prompt in prompts]
    with scripted(kv_cache_memory_bytes=8 * BLOCK, enable_prefix_caching=caching) as llm:
        work = llm.submit(prompts, params)
        streamed = []
        for generation in work:
            chunks = list(generation)
            streamed.append(([t for c in chunks for t in c.token_ids], [c.text for c in chunks]))
        for out, (ids, texts), alone in zip(work.result(), streamed, solo, strict=True):
            one = out.outputs[0]
            assert one.token_ids == ids == alone.token_ids
            assert one.text == "".join(texts) == alone.text
            assert one.logprobs == alone.logprobs
            assert len(one.token_ids) == 60
        assert llm.metrics["preemptions"] > 0
        assert llm.metrics["generated_tokens"] == 60 * count
        assert eventually(lambda: llm.memory().in_use == 0)


def test_idle_branches_lose_their_kv_and_never_go_stale() -> None:
    with scripted(kv_cache_memory_bytes=8 * BLOCK) as llm, scripted() as large:
        branches = [llm.branch(tokens(60, seed=n)) for n in range(6)]
        others = [large.branch(tokens(60, seed=n)) for n in range(6)]
        for _ in range(3):
            for branch, other in zip(branches, others, strict=True):
                found = branch.generate(max_tokens=5, ignore_eos=True).result()
                expected = other.generate(max_tokens=5, ignore_eos=True).result()
                assert found.token_ids == expected.token_ids
        assert llm.metrics["recomputed_tokens"] > 0
        assert [b.kv.location for b in branches].count("none") > 0


def test_a_leased_branch_keeps_its_kv_while_others_lose_theirs() -> None:
    with scripted(kv_cache_memory_bytes=8 * BLOCK) as llm:
        kept = llm.branch(tokens(60))
        kept.generate(max_tokens=1).result()
        kept.keep(600)
        for number in range(1, 6):
            other = llm.branch(tokens(60, seed=number))
            other.generate(max_tokens=1).result()
        assert kept.kv.location == "device"
        kept.keep(0)
        llm.branch(tokens(100, seed=9)).generate(max_tokens=1).result()
        assert kept.kv.location == "none"


def test_leases_hold_at_most_half_of_the_pool() -> None:
    with scripted(kv_cache_memory_bytes=8 * BLOCK) as llm:
        first, second = llm.branch(tokens(60)), llm.branch(tokens(60, seed=1))
        for branch in (first, second):
            branch.generate(max_tokens=1).result()
        first.keep(600)
        with pytest.raises(InvalidRequestError, match=r"8 blocks would be kept.*limit is 4 of 8"):
            second.keep(600)
        # A lease is no pin: what runs gets the room that it needs.
        out = llm.generate(tokens(120, seed=2), SamplingParams(max_tokens=2, ignore_eos=True))
        assert len(out[0].outputs[0].token_ids) == 2


def test_preempted_and_cancelled_work_leaves_nothing_behind() -> None:
    with scripted(kv_cache_memory_bytes=8 * BLOCK) as llm:
        for _ in range(10):
            work = llm.submit(
                [tokens(40, seed=n) for n in range(6)],
                SamplingParams(max_tokens=60, ignore_eos=True),
            )
            next(iter(work[0]))
            work.cancel()
        assert eventually(lambda: llm.memory().in_use == 0)
        assert llm.metrics["running"] == llm.metrics["waiting"] == 0
