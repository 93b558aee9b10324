"""The KV tree: sealing, forks, cuts, splits, matches and eviction, each with the laws checked."""

from __future__ import annotations

import random

import pytest
from tree_rig import Grove

from cotrt.tree.node import common_prefix
from cotrt.tree.sequence import Sequence


def node_spans(grove: Grove) -> list[tuple[int, int]]:
    return sorted((node.start, node.end) for node in grove.tree.nodes())


def test_full_blocks_are_sealed_and_the_rest_is_a_private_tail() -> None:
    grove = Grove(block_size=4)
    seq = grove.root(range(10))
    grove.compute(seq)
    assert (seq.node.end, seq.private_len, seq.num_computed) == (8, 2, 10)
    assert grove.counts == (61, 3, 0)


def test_a_lone_sequence_grows_one_node_however_it_is_computed() -> None:
    grove = Grove(block_size=4)
    seq = grove.root()
    for token in range(16):
        grove.compute(seq, [token])
    assert node_spans(grove) == [(0, 16)]
    assert seq.private == []


def test_a_fork_shares_all_blocks_and_takes_none() -> None:
    grove = Grove(block_size=4)
    seq = grove.root(range(10))
    grove.compute(seq)
    before = grove.counts
    children = [grove.fork(seq) for _ in range(5)]
    grove.check()
    assert grove.counts == before
    assert all(child.num_computed == 10 for child in children)


def test_the_first_to_write_a_shared_tail_copies_it_and_the_last_writes_in_place() -> None:
    grove = Grove(block_size=4)
    seq = grove.root(range(6))
    grove.compute(seq)
    tail = seq.private[0]
    child = grove.fork(seq)
    copy = grove.compute(child, [100])
    assert copy is not None and copy[0] == tail and copy[1] == child.private[0] != tail
    assert grove.compute(seq, [200]) is None
    assert seq.private == [tail]
    assert grove.tree.num_copies_on_write == 1


def test_a_fork_inside_a_sealed_block_views_it_and_copies_on_the_first_write() -> None:
    grove = Grove(block_size=4)
    seq = grove.root(range(12))
    grove.compute(seq)
    sealed = seq.node.blocks[1]
    child = grove.fork(seq, 6)
    grove.check()
    assert (child.num_computed, child.private) == (6, [sealed])
    assert node_spans(grove) == [(0, 4), (4, 12)]
    copy = grove.compute(child, [100])
    assert copy is not None and copy[0] == sealed
    assert seq.num_computed == 12


def test_truncating_at_every_length_keeps_that_much_kv() -> None:
    for length in range(22):
        grove = Grove(block_size=4)
        seq = grove.root(range(21))
        grove.compute(seq)
        other = grove.fork(seq)
        grove.tree.truncate_tip(seq, length)
        seq.span = seq.span.truncated(length)
        grove.check()
        assert seq.num_computed == min(length, 21)
        grove.compute(seq, [77, 78, 79, 80, 81])
        assert other.num_computed == 21
        grove.drop(seq, pruned=True)
        grove.drop(other, pruned=True)
        assert grove.counts[1] == 0


def test_a_prompt_that_diverges_inside_a_node_splits_it_at_a_block_edge() -> None:
    grove = Grove(block_size=4)
    first = grove.root(range(16))
    grove.compute(first)
    second = grove.root([*range(10), 50, 51, 52])
    grove.tree.advance(second, 13)
    grove.check()
    # Two whole blocks, and two tokens of the third: its matching part is reused too.
    assert second.num_computed == 10
    assert node_spans(grove) == [(0, 8), (8, 16)]
    copy = grove.compute(second)
    assert copy is not None
    assert grove.compute(first, [16]) is None


def test_a_match_goes_no_further_than_its_limit() -> None:
    grove = Grove(block_size=4)
    grove.compute(grove.root(range(16)))
    for limit in range(17):
        seq = grove.root(range(16))
        grove.tree.advance(seq, limit)
        grove.check()
        assert seq.num_computed == limit


def test_the_unsealed_tail_of_another_sequence_is_matched() -> None:
    grove = Grove(block_size=4)
    first = grove.root(range(7))
    grove.compute(first)
    second = grove.root(range(7))
    grove.tree.advance(second, 7)
    grove.check()
    assert second.num_computed == 7
    assert second.private == first.private


def test_a_block_computed_twice_is_exchanged_for_the_first_when_it_is_full() -> None:
    grove = Grove(block_size=4)
    first, second = grove.root(range(6)), grove.root(range(6))
    grove.compute(first)
    grove.compute(second)  # not matched: as if both had been computed in one step
    grove.check()
    assert second.node is first.node
    assert grove.counts[1] == 3  # one shared block, two tails
    grove.compute(first, [6, 7])
    grove.compute(second, [6, 7])
    assert grove.counts == (62, 2, 0)


def test_siblings_that_seal_the_same_tokens_end_in_one_node() -> None:
    grove = Grove(block_size=4)
    parent = grove.root(range(4))
    grove.compute(parent)
    children = [grove.fork(parent) for _ in range(3)]
    for child in children:
        grove.compute(child, [9, 9, 9, 9, 9])
    assert len({id(child.node) for child in children}) == 1
    assert node_spans(grove) == [(0, 4), (4, 8)]


def test_pruned_blocks_are_cached_at_once_and_matched_until_they_are_evicted() -> None:
    grove = Grove(block_size=4)
    seq = grove.root(range(10))
    grove.compute(seq)
    grove.drop(seq, pruned=True)
    assert grove.counts == (62, 0, 2)
    again = grove.root(range(10))
    grove.tree.advance(again, 10)
    assert again.num_computed == 8
    assert grove.counts == (62, 2, 0)


def cached(grove: Grove, ids: list[int], *, pruned: bool) -> None:
    seq = grove.root(ids)
    grove.tree.advance(seq, len(ids))
    grove.compute(seq)
    grove.drop(seq, pruned=pruned)


def held(grove: Grove, ids: list[int]) -> int:
    """How much of `ids` a prompt would find."""
    seq = grove.root(ids)
    grove.tree.advance(seq, len(ids))
    found = seq.num_computed
    grove.drop(seq)
    return found


def test_eviction_takes_pruned_blocks_first_then_the_coldest_leaf() -> None:
    grove = Grove(num_blocks=6, block_size=4)
    cold, warm, cut = [1] * 8, [2] * 8, [3] * 8
    cached(grove, cold, pruned=False)
    cached(grove, warm, pruned=False)
    cached(grove, cut, pruned=True)
    seq = grove.root()
    order = []
    for token in range(6):
        grove.compute(seq, [10 + token] * 4)
        nodes = {node.keys[0][0]: len(node.blocks) for node in grove.tree.nodes()}
        order.append([nodes.get(kind, 0) for kind in (1, 2, 3)])
    assert order == [[2, 2, 1], [2, 2, 0], [1, 2, 0], [0, 2, 0], [0, 1, 0], [0, 0, 0]]
    assert grove.tree.num_evicted == 6


def test_a_cached_path_that_is_used_again_becomes_warm() -> None:
    grove = Grove(num_blocks=4, block_size=4)
    cached(grove, [1] * 8, pruned=False)
    cached(grove, [2] * 8, pruned=False)
    assert held(grove, [1] * 8) == 8
    grove.compute(grove.root([9] * 4))
    assert held(grove, [1] * 8) == 8
    assert held(grove, [2] * 8) == 4


def test_no_ancestor_is_evicted_before_its_descendants() -> None:
    grove = Grove(num_blocks=8, block_size=4)
    trunk = list(range(8))
    cached(grove, [*trunk, 1, 1, 1, 1], pruned=False)
    cached(grove, [*trunk, 2, 2, 2, 2], pruned=True)
    seq = grove.root()
    for token in range(8):
        grove.compute(seq, [50 + token] * 4)
        for node in grove.tree.nodes():
            parent = node.parent
            assert parent is grove.tree.root or parent.blocks
    assert grove.counts == (0, 8, 0)


def test_an_ancestor_with_a_live_descendant_is_never_evicted() -> None:
    grove = Grove(num_blocks=4, block_size=4)
    trunk = grove.root(range(8))
    grove.compute(trunk)
    child = grove.fork(trunk)
    grove.compute(child, [8, 9, 10, 11])
    grove.drop(trunk)
    grove.compute(grove.root([5] * 4))
    assert not grove.tree.can_allocate(1)
    assert child.num_computed == 12


def test_the_order_of_eviction_takes_no_room_beyond_the_pool() -> None:
    grove = Grove(num_blocks=8, block_size=4)
    cached(grove, list(range(8)), pruned=False)
    for _ in range(5000):
        held(grove, list(range(8)))
    assert len(grove.tree._cold) < 200


def test_sealed_paths_of_20_000_forks_need_no_recursion() -> None:
    grove = Grove(num_blocks=30_000, block_size=1)
    seq = grove.root([0])
    grove.tree.reserve(seq, 1)
    grove.tree.commit(seq, 1)
    for number in range(20_000):
        child = grove.fork(seq)
        child.span.extend([number])
        grove.tree.reserve(child, 1)
        grove.tree.commit(child, 1)
        grove.tree.detach(seq)
        grove.sequences.remove(seq)
        seq = child
    grove.tree.truncate_tip(seq, 5)
    grove.tree.release(seq)
    assert grove.counts[1] == 0


def test_the_longest_partial_match_is_found_among_many_children_and_tails() -> None:
    pick = random.Random(3)
    for _ in range(60):
        grove = Grove(num_blocks=512, block_size=4)
        prompts = [[pick.randrange(3) for _ in range(pick.randint(1, 7))] for _ in range(40)]
        for prompt in prompts:
            seq = grove.root(prompt)
            grove.compute(seq)
            if pick.random() < 0.5:
                grove.drop(seq)  # its tail goes, its full block stays
        kept = [seq.ids() for seq in grove.sequences] + [p[: len(p) // 4 * 4] for p in prompts]
        wanted = [pick.randrange(3) for _ in range(6)]
        best = max(common_prefix(ids, wanted) for ids in kept)
        assert held(grove, wanted) == best


def test_blocks_that_a_sequence_holds_alone() -> None:
    grove = Grove(block_size=4)
    parent = grove.root(range(9))
    grove.compute(parent)
    assert grove.tree.blocks_alone(parent) == 3
    child = grove.fork(parent)
    assert grove.tree.blocks_alone(parent) == grove.tree.blocks_alone(child) == 0
    grove.compute(child, range(9, 17))
    assert grove.tree.blocks_alone(child) == 3
    assert grove.tree.blocks_of(child) >= grove.tree.blocks_of(parent) - set(parent.private)


def test_a_broken_law_is_named() -> None:
    grove = Grove(block_size=4)
    seq = grove.root(range(8))
    grove.compute(seq)
    seq.node.num_live += 1
    with pytest.raises(AssertionError, match="num_live 2, 1 tips and 0 live children"):
        grove.check()


@pytest.mark.parametrize("seed", range(20))
def test_laws_hold_through_random_growth_cuts_and_evictions(seed: int) -> None:
    pick = random.Random(seed)
    grove = Grove(num_blocks=pick.choice([12, 40]), block_size=pick.choice([1, 2, 4]))

    def room(seq: Sequence) -> int:
        spare = grove.tree.pool.num_free + grove.tree.pool.num_cached - 1
        return max(0, spare) * grove.tree.block_size

    for _ in range(300):
        seq = pick.choice(grove.sequences) if grove.sequences else grove.root()
        what = pick.random()
        if what < 0.4:
            ids = [pick.randrange(2) for _ in range(pick.randint(1, 6))]
            if seq.length - seq.num_computed + len(ids) < room(seq):
                grove.compute(seq, ids)
        elif what < 0.6:
            grove.fork(seq, pick.randint(0, seq.length))
        elif what < 0.75:
            length = pick.randint(0, seq.length)
            grove.tree.truncate_tip(seq, length)
            seq.span = seq.span.truncated(length)
        elif what < 0.85:
            grove.tree.advance(seq, pick.randint(0, seq.length))
        elif what < 0.9:
            grove.tree.release(seq)
        else:
            grove.drop(seq, pruned=pick.random() < 0.5)
        grove.check()
    for seq in list(grove.sequences):
        grove.drop(seq)
    assert grove.counts[1] == 0
