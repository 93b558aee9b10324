"""What is computed and what is stored, row by row and block by block."""

from __future__ import annotations

import random

import pytest
from engine_rig import Rig, from_scratch

from cotrt.options.sampling import SamplingParams
from cotrt.program.stats import memory_stats


def tokens(count: int, seed: int = 0) -> list[int]:
    pick = random.Random(seed)
    return [pick.randrange(1, 12) for _ in range(count)]


def test_32_forks_of_an_uncomputed_prompt_draw_from_one_row() -> None:
    rig = Rig(num_blocks=256, check=False)
    branches = rig.root(tokens(1000)).fork(32)
    states = [rig.start(branch, max_tokens=1) for branch in branches]
    rig.run()
    assert (rig.model.num_rows, rig.model.num_logits_rows) == (1000, 1)
    assert len({tuple(state.tokens) for state in states}) > 4
    rig.check()


@pytest.mark.parametrize("budget", [64, 300])
def test_32_equal_prompts_in_chunks_compute_each_token_once(budget: int) -> None:
    rig = Rig(num_blocks=256, max_num_batched_tokens=budget, check=False)
    roots = [rig.root(tokens(1000)) for _ in range(32)]
    states = [rig.start(root, max_tokens=1) for root in roots]
    rig.run()
    assert (rig.model.num_rows, rig.model.num_logits_rows) == (1000, 1)
    assert len(rig.model.steps) == -(-1000 // budget)
    assert [state.num_cached for state in states].count(999) == 31
    rig.check()


def test_followers_whose_leader_is_pruned_in_flight_compute_the_rest_once() -> None:
    rig = Rig(num_blocks=256, max_num_batched_tokens=64)
    roots = [rig.root(tokens(500)) for _ in range(8)]
    states = [rig.start(root, max_tokens=3, ignore_eos=True) for root in roots]
    rig.step()
    rig.step()
    rig.model.in_flight.append(roots[0].prune)
    rig.step()  # its rows are lost: they were to be committed to the pruned leader
    rig.run()
    assert rig.metrics["prompt_tokens_computed"] == 500
    assert rig.metrics["recomputed_tokens"] <= 64 + 7 * 2  # equal draws are computed by each
    twins = from_scratch(states[1:], 1 << 16, [tokens(500)] * 7, [[False] * 500] * 7)
    for state, twin in zip(states[1:], twins, strict=True):
        assert state.tokens == twin.tokens


def test_waste_of_32_branches_over_a_long_prompt_at_every_step() -> None:
    pick = random.Random(0)
    rig = Rig(num_blocks=800, block_size=16, check=False)
    root = rig.root(tokens(1030))
    branches = root.fork(32)
    for branch in branches:
        rig.start(branch, max_tokens=pick.randint(200, 330), ignore_eos=True)
    while rig.engine.has_work:
        rig.step()
        rig.check_memory()
    memory = memory_stats(rig.engine)
    assert memory.waste < 0.04
    assert memory.tokens_held == sum(b.kv.computed_tokens for b in (root, *branches))
    root.prune()
    rig.check_empty()


def test_a_step_hands_out_blocks_for_its_own_tokens_only() -> None:
    rig = Rig(num_blocks=64, block_size=8)
    branch = rig.root(tokens(7))
    rig.start(branch, max_tokens=20, ignore_eos=True)
    for _ in range(20):
        rig.step()
        computed = branch.kv.computed_tokens
        assert rig.tree.pool.num_in_use == -(-computed // 8)


def test_24_branches_in_a_third_of_their_room_are_equal_to_a_large_pool() -> None:
    results = []
    for num_blocks in (600, 66):
        rig = Rig(num_blocks=num_blocks, block_size=8, check=num_blocks < 100)
        root = rig.root(tokens(30))
        branches = root.fork(24)
        states = []
        for number, branch in enumerate(branches):
            branch.extend(tokens(5 + number, seed=number))
            params = SamplingParams(
                max_tokens=40,
                ignore_eos=True,
                temperature=[0.0, 1.0][number % 2],
                presence_penalty=[0.0, 0.6, 0.0][number % 3],
                priority=number % 2,
            )
            states.append(rig.start(branch, params))
        rig.run()
        results.append([(s.tokens, s.finish_reason, s.stop_reason) for s in states])
        assert (rig.metrics["preemptions"] > 0) == (num_blocks == 66)
        root.prune()
        rig.check_empty()
    assert results[0] == results[1]
    assert {(finish, stop) for _, finish, stop in results[1]} == {("length", None)}


def test_a_request_alone_uses_the_last_block_of_the_pool() -> None:
    for prompt, count in ((60, 5), (64, 1), (33, 32)):
        rig = Rig(num_blocks=8, block_size=8)
        state = rig.start(rig.root(tokens(prompt)), max_tokens=count, ignore_eos=True)
        rig.run()
        assert (len(state.tokens), state.stop_reason) == (count, None)
    rig = Rig(num_blocks=8, block_size=8)
    state = rig.start(rig.root(tokens(60)), max_tokens=99, ignore_eos=True)
    rig.run()
    assert (len(state.tokens), state.finish_reason, state.stop_reason) == (
        5,
        "length",
        "kv_capacity",
    )
    assert state.tokens == rig.solo(state).tokens[:5]
