"""`llm.memory()` and `b.kv`: what is free, held, cached and shared, and how little is wasted."""

from __future__ import annotations

import gc
import random

from api_helpers import eventually, scripted
from test_reuse import tokens

from cotrt import SamplingParams


def test_blocks_add_up_while_work_runs_and_nothing_is_held_at_the_end() -> None:
    with scripted() as llm:
        root = llm.branch(tokens(100))
        branches = root.fork(16)
        work = branches.generate(max_tokens=150, ignore_eos=True)
        looks = 0
        while not work.done:
            memory = llm.memory()
            assert memory.free + memory.in_use + memory.cached == memory.total
            looks += 1
        assert looks > 3
        root.prune()
        memory = llm.memory()
        assert (memory.in_use, memory.tokens_held, memory.tokens_stored) == (0, 0, 0)


def test_pruning_releases_at_once_and_leaves_full_blocks_cached() -> None:
    with scripted() as llm:
        root = llm.branch(tokens(40))
        root.generate(max_tokens=1).result()
        before = llm.memory()
        assert before.in_use == 3
        root.prune()
        after = llm.memory()
        assert (after.in_use, after.cached) == (0, 2)
        assert llm.generate(tokens(40), SamplingParams(max_tokens=1))[0].num_cached_tokens == 32


def test_forks_take_no_blocks_and_sharing_says_so() -> None:
    with scripted() as llm:
        root = llm.branch(tokens(160))
        root.generate(max_tokens=1).result()
        before = llm.memory()
        children = root.fork(9)
        after = llm.memory()
        assert after.in_use == before.in_use
        assert after.tokens_held == 10 * before.tokens_held
        assert after.sharing == 10.0
        assert children[0].kv.shared_blocks == children[0].kv.blocks == 10
        children.prune()
        assert llm.memory() == before


def test_waste_is_at_most_the_empty_rest_of_each_tail() -> None:
    pick = random.Random(0)
    with scripted(kv_cache_memory_bytes=1 << 17) as llm:
        root = llm.branch(tokens(1030))
        branches = root.fork(32)
        params = [
            SamplingParams(max_tokens=pick.randint(200, 330), ignore_eos=True) for _ in range(32)
        ]
        work = branches.generate(params)
        while not work.done:
            memory = llm.memory()
            empty = memory.in_use * 16 - memory.tokens_stored
            assert 0 <= empty <= 33 * 15
        work.result()
        memory = llm.memory()
        assert memory.waste < 0.04
        held = sum(branch.kv.computed_tokens for branch in (root, *branches))
        assert memory.tokens_held == held


def test_dropped_handles_give_their_blocks_back() -> None:
    with scripted() as llm:
        for _ in range(20):
            branch = llm.branch(tokens(64))
            branch.fork(4).generate(max_tokens=3).result()
            del branch
            gc.collect()
        assert eventually(lambda: llm.memory().in_use == 0)


def test_kv_of_a_branch_says_where_it_is() -> None:
    with scripted() as llm:
        branch = llm.branch(tokens(20))
        assert (branch.kv.location, branch.kv.computed_tokens, branch.kv.num_tokens) == (
            "none",
            0,
            20,
        )
        branch.generate(max_tokens=3, ignore_eos=True).result()
        kv = branch.kv
        assert (kv.location, kv.computed_tokens, kv.num_tokens) == ("device", 22, 23)
        assert (kv.blocks, kv.private_blocks, kv.shared_blocks) == (2, 2, 0)
        assert kv.bytes == 2 * 16 * 4
        branch.prune()
        assert branch.kv.location == "none"


def test_a_chain_of_20_000_forks() -> None:
    with scripted() as llm:
        branch = llm.branch(tokens(10))
        first = branch
        for number in range(20_000):
            branch = branch.fork()[0]
            if number % 1000 == 0:
                branch.extend([97])
        assert (branch.depth, len(branch)) == (20_000, 30)
        branch.generate(max_tokens=2, ignore_eos=True).result()
        assert llm.metrics["prompt_tokens_computed"] == 30
        first.prune()
        assert not branch.alive
        assert llm.memory().in_use == 0
