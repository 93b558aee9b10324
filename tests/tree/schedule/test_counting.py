"""Path hashes, and the memory of which tokens were computed before."""

from __future__ import annotations

import random

import numpy as np
from tree_rig import Grove

from cotrt.tree.schedule.counting import SeenTokens, path_hash, token_hashes


def words(ids: list[int]) -> int:
    array = np.array(ids, np.int64)
    total = token_hashes(np.arange(len(ids), dtype=np.int64), array).sum(dtype=np.uint64)
    return int(total)


def test_a_path_hash_is_the_same_wherever_node_and_tail_meet() -> None:
    ids = [7, 1, 1, 4, 4, 9, 2, 0, 3, 3, 5]
    for length in range(len(ids) + 1):
        grove = Grove(block_size=4)
        seq = grove.root(ids[:length])
        grove.compute(seq)
        assert path_hash(seq, length) == words(ids[:length])


def test_a_path_hash_survives_splits_growth_and_eviction() -> None:
    pick = random.Random(1)
    grove = Grove(num_blocks=24, block_size=2)
    for _ in range(400):
        ids = [pick.randrange(2) for _ in range(pick.randint(1, 12))]
        seq = grove.root(ids)
        grove.tree.advance(seq, len(ids))
        assert path_hash(seq, seq.num_computed) == words(ids[: seq.num_computed])
        grove.compute(seq)
        assert path_hash(seq, len(ids)) == words(ids)
        grove.compute(seq, [1, 1, 0])
        assert path_hash(seq, len(ids) + 3) == words([*ids, 1, 1, 0])
        grove.drop(seq)


def test_order_and_position_matter() -> None:
    assert len({words(ids) for ids in ([1, 2], [2, 1], [1, 2, 0], [0, 1, 2], [3], [1])}) == 6


def test_new_hashes_are_told_from_known_ones_and_from_twins_in_one_call() -> None:
    seen = SeenTokens()
    first = seen.add(np.array([5, 6, 5, 0, 0], np.uint64))
    assert first.tolist() == [True, True, False, True, False]
    again = seen.add(np.array([6, 7], np.uint64))
    assert again.tolist() == [False, True]


def test_the_memory_grows_with_what_is_in_it_and_is_bounded() -> None:
    seen, exact = SeenTokens(capacity=1 << 12), set[int]()
    pick = np.random.default_rng(0)
    for _ in range(100):
        hashes = pick.integers(1, 5000, 300).astype(np.uint64)
        new = seen.add(hashes)
        for value, was_new in zip(hashes.tolist(), new.tolist(), strict=True):
            assert was_new == (value not in exact)
            exact.add(value)
    for _ in range(200):
        seen.add(pick.integers(1, 1 << 63, 500).astype(np.uint64))
    assert len(seen._young) <= 2 << 12
    assert seen._old is not None and len(seen._old) <= 2 << 12


def test_more_hashes_in_one_call_than_the_memory_holds() -> None:
    seen = SeenTokens(capacity=1 << 10)
    assert seen.add(np.arange(1, 10_000, dtype=np.uint64)).all()
    recent = np.arange(10_000 - 1000, 10_000, dtype=np.uint64)
    assert not seen.add(recent).any()
