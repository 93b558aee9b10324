"""Prefixes are computed once: across branches, prompts and turns, to the token."""

from __future__ import annotations

import random
from typing import Any

import pytest
from api_helpers import letters, scripted

from cotrt import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=2)


def tokens(count: int, seed: int = 0) -> list[int]:
    pick = random.Random(seed)
    return [97 + pick.randrange(26) for _ in range(count)]


def computed(llm: LLM) -> int:
    metrics = llm.metrics
    return metrics["prompt_tokens_computed"] + metrics["generated_tokens_computed"]


def values(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in llm.generate(prompts, params)]


def test_32_forks_of_an_uncomputed_prompt_compute_it_once() -> None:
    with scripted() as llm:
        root = llm.branch(tokens(1000))
        branches = root.fork(32)
        branches.generate(max_tokens=1).result()
        metrics = llm.metrics
        assert metrics["prompt_tokens_computed"] == 1000
        assert metrics["recomputed_tokens"] == 0
        assert metrics["steps"] == 1  # so the first tokens of all came from one set of logits
        assert metrics["prompt_tokens_reused"] == 31 * 1000
        assert len({tuple(b.token_ids) for b in branches}) > 5


def test_32_equal_prompts_of_one_call_compute_it_once() -> None:
    with scripted() as llm:
        outs = llm.generate([tokens(1000)] * 32, SamplingParams(max_tokens=1))
        metrics = llm.metrics
        assert (metrics["prompt_tokens_computed"], metrics["steps"]) == (1000, 1)
        assert [out.num_cached_tokens for out in outs].count(0) == 1
        assert [out.num_cached_tokens for out in outs].count(999) == 31


def test_forks_that_generate_later_start_from_the_parents_kv() -> None:
    with scripted() as llm:
        root = llm.branch(tokens(100))
        root.generate(max_tokens=20, ignore_eos=True).result()
        for branch in root.fork(4):
            branch.generate(max_tokens=5, ignore_eos=True).result()
        assert llm.metrics["prompt_tokens_computed"] == 100


@pytest.mark.parametrize("length", [15, 16, 17, 32, 48])
def test_a_fully_cached_prompt_answers_as_at_first(length: int) -> None:
    prompt = tokens(length)
    with scripted() as llm, scripted(enable_prefix_caching=False) as cold:
        first, second = (llm.generate(prompt, GREEDY)[0] for _ in range(2))
        pair = llm.generate([prompt, prompt], GREEDY)
        third = llm.generate([*prompt, *tokens(9, seed=1)], GREEDY)[0]
        expected = cold.generate(prompt, GREEDY)[0].outputs[0]
        longer = cold.generate([*prompt, *tokens(9, seed=1)], GREEDY)[0].outputs[0]
        for out in (first, second, *pair):
            assert out.outputs[0].token_ids == expected.token_ids
            assert out.outputs[0].logprobs == expected.logprobs
            assert out.num_cached_tokens < length
        assert first.num_cached_tokens == 0
        assert second.num_cached_tokens == length - 1
        assert third.outputs[0].token_ids == longer.token_ids
        assert third.num_cached_tokens >= length // 16 * 16


@pytest.mark.parametrize("max_tokens", [6, 22])
def test_a_follow_up_reuses_generated_tokens_up_to_the_last_computed_one(max_tokens: int) -> None:
    prompt, more = tokens(10), tokens(5, seed=2)
    with scripted() as llm, scripted(enable_prefix_caching=False) as cold:
        params = GREEDY.replace(max_tokens=max_tokens)
        history = prompt + llm.generate(prompt, params)[0].outputs[0].token_ids
        out = llm.generate(history + more, GREEDY)[0]
        expected = cold.generate(history + more, GREEDY)[0].outputs[0]
        assert out.outputs[0].token_ids == expected.token_ids
        assert out.outputs[0].logprobs == expected.logprobs
        assert len(history) - 1 - 16 < out.num_cached_tokens <= len(history) - 1


def test_a_session_keeps_its_generated_ids_and_computes_new_ones_only() -> None:
    with scripted() as llm:
        branch = llm.branch(tokens(33))
        length = 33
        for turn in range(8):
            before = computed(llm)
            branch.generate(max_tokens=7, ignore_eos=True).result()
            branch.extend(tokens(5, seed=turn))
            # The last sampled token of the turn before, its extension, and six of the seven now.
            assert computed(llm) - before == (33 if turn == 0 else 6) + 6
            length += 12
        assert len(branch) == length
        assert llm.metrics["recomputed_tokens"] == 0


def test_equal_prompts_that_run_beside_others_in_a_full_pool_read_their_own_kv() -> None:
    same, others = tokens(40), [tokens(50, seed=n) for n in range(1, 9)]
    seeds = [SamplingParams(seed=s, max_tokens=60, ignore_eos=True, logprobs=2) for s in range(4)]
    churn = SamplingParams(max_tokens=12, ignore_eos=True, seed=5)

    def answers(llm: LLM, prompts: list[list[int]], params: Any) -> list[Any]:
        outs = [out.outputs[0] for out in llm.generate(prompts, params)]
        return [(out.token_ids, out.logprobs) for out in outs]

    with scripted() as large:
        solo = [answers(large, [same], one)[0] for one in seeds]
        alone = [answers(large, [prompt], churn)[0] for prompt in others]
    # 4 x 100 and 8 x 62 tokens, 40 of them shared: 51 blocks would hold all, 24 never do.
    for _ in range(10):  # each cold: all four compute the prompt, or wait for one that does
        with scripted(kv_cache_memory_bytes=24 * 64) as llm:
            found = answers(llm, [same] * 4 + others, seeds + [churn] * 8)
            assert found == solo + alone
            memory = llm.memory()
            assert (memory.in_use, memory.free + memory.cached) == (0, 24)
            assert llm.metrics["preemptions"] > 0


def test_a_seeded_request_draws_the_same_alone_and_with_mates() -> None:
    prompt, mates = tokens(20), [tokens(20 + n, seed=n) for n in range(1, 8)]
    seeded = SamplingParams(seed=42, max_tokens=12, ignore_eos=True)
    free = SamplingParams(max_tokens=12, ignore_eos=True)
    with scripted() as llm:
        alone = values(llm, [prompt], seeded)[0]
        [again] = llm.generate(prompt, seeded)
        assert again.outputs[0].token_ids == alone and again.num_cached_tokens > 0
        assert values(llm, [prompt, mates[0]], [seeded, free])[0] == alone  # type: ignore[arg-type]
        batch = [*mates[:4], prompt, *mates[4:]]
        each = [free] * 4 + [seeded] + [free] * 3
        assert values(llm, batch, each)[4] == alone  # type: ignore[arg-type]


def test_n_outputs_of_one_seed_differ_and_repeat() -> None:
    params = SamplingParams(seed=42, n=4, max_tokens=12, ignore_eos=True)
    with scripted() as llm:
        first, again = (
            [o.token_ids for o in llm.generate(tokens(20), params)[0].outputs] for _ in range(2)
        )
        assert first == again
        assert len({tuple(ids) for ids in first}) == 4
        one = llm.generate(tokens(20), params.replace(n=1))[0].outputs[0].token_ids
        assert one == first[0]


def test_unseeded_requests_differ_and_the_program_repeats() -> None:
    def program() -> list[list[int]]:
        params = SamplingParams(max_tokens=12, ignore_eos=True)
        with scripted(letters) as llm:
            one_by_one = [values(llm, [tokens(20)], params)[0] for _ in range(6)]
            together = values(llm, [tokens(20)] * 6, params)
        return one_by_one + together

    first = program()
    assert len({tuple(ids) for ids in first}) == 12
    assert first == program()


def test_a_retry_after_truncate_draws_anew_and_reproducibly() -> None:
    def program() -> list[tuple[int, ...]]:
        with scripted() as llm:
            branch = llm.branch(tokens(20))
            found = []
            for _ in range(50):
                length = len(branch)
                out = branch.generate(max_tokens=8, ignore_eos=True).result()
                found.append(tuple(out.token_ids))
                branch.truncate(length)
            assert llm.metrics["prompt_tokens_computed"] == 20
            return found

    first = program()
    assert len(set(first)) == 50
    assert program() == first


def test_same_draws_after_a_truncate_are_the_same() -> None:
    with scripted() as llm:
        branch = llm.branch(tokens(20))
        first = branch.generate(max_tokens=8, ignore_eos=True).result().token_ids
        branch.truncate(20, same_draws=True)
        assert branch.generate(max_tokens=8, ignore_eos=True).result().token_ids == first


def test_pruning_a_sibling_changes_nobody_elses_draws() -> None:
    def program(prune: bool) -> list[list[int]]:
        with scripted() as llm:
            root = llm.branch(tokens(20))
            first = root.fork(3)
            if prune:
                first[1].prune()
            late = root.fork(1)[0]
            work = [first[0], first[2], late]
            return [b.generate(max_tokens=8, ignore_eos=True).result().token_ids for b in work]

    assert program(False) == program(True)


def test_scored_tokens_are_computed_once_and_the_branch_is_unchanged() -> None:
    with scripted() as llm:
        branch = llm.branch(tokens(50))
        branch.score([[100, 101], [100, 102]], given=[99]).result()
        # The prompt, the given token, and the first token of both options (it is the same one).
        assert llm.metrics["prompt_tokens_computed"] == 52
        assert len(branch) == 50
        assert branch.kv.computed_tokens == 50


def test_with_caching_off_prompts_are_computed_again_and_forks_still_share() -> None:
    with scripted(enable_prefix_caching=False) as llm:
        for _ in range(2):
            llm.generate(tokens(40), SamplingParams(max_tokens=1))
        assert llm.metrics["prompt_tokens_reused"] == 0
        branches = llm.branch(tokens(40, seed=9)).fork(8)
        before = computed(llm) + llm.metrics["recomputed_tokens"]
        branches.generate(max_tokens=1).result()
        assert computed(llm) + llm.metrics["recomputed_tokens"] == before + 40
