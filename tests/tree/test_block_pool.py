"""The pool: free, in use and cached blocks, and the counts of their holders."""

from __future__ import annotations

import pytest

from cotrt.tree.block_pool import BlockPool


def counts(pool: BlockPool) -> tuple[int, int, int]:
    return pool.num_free, pool.num_in_use, pool.num_cached


def test_a_block_that_was_never_sealed_becomes_free_again() -> None:
    pool = BlockPool(4, 8)
    block = pool.allocate()
    assert counts(pool) == (3, 1, 0)
    pool.hold(block)
    pool.release(block)
    assert counts(pool) == (3, 1, 0)
    pool.release(block)
    assert counts(pool) == (4, 0, 0)


def test_a_sealed_block_without_holders_is_cached_until_its_node_gives_it_up() -> None:
    pool = BlockPool(4, 8)
    block = pool.allocate()
    pool.seal(block)
    pool.release(block)
    assert counts(pool) == (3, 0, 1)
    pool.hold(block)
    assert counts(pool) == (3, 1, 0)
    pool.release(block)
    pool.unseal(block)
    assert counts(pool) == (4, 0, 0)


def test_a_block_given_up_by_its_node_stays_in_use_while_a_tail_holds_it() -> None:
    pool = BlockPool(2, 8)
    block = pool.allocate()
    pool.seal(block)
    pool.unseal(block)
    assert counts(pool) == (1, 1, 0)
    pool.release(block)
    assert counts(pool) == (2, 0, 0)


def test_bookkeeping_bugs_are_named() -> None:
    pool = BlockPool(2, 8)
    with pytest.raises(AssertionError, match="is free and cannot be held"):
        pool.hold(0)
    block = pool.allocate()
    pool.release(block)
    with pytest.raises(AssertionError, match="released more often than held"):
        pool.release(block)
    held = pool.allocate()
    with pytest.raises(AssertionError, match="counts 1 holders, 0 can be named"):
        pool.check_invariants([0, 0], set())
    expected = [0, 0]
    expected[held] = 1
    pool.check_invariants(expected, set())
    pool.seal(held)
    with pytest.raises(AssertionError, match="sealed=True, owned=False"):
        pool.check_invariants(expected, set())
