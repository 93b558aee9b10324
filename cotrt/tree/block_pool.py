"""The pool of KV blocks: who holds each one, and which are free, in use or cached."""

from __future__ import annotations


class BlockPool:
    """Counts of holders for a fixed set of blocks. Knows nothing of tokens or of the tree.

    A block's holders are the live tree node that owns it (at most one) and the tails that end in
    it. A block owned by a node is *sealed*: full, and never written again.

        free      no holder, not sealed
        in use    at least one holder
        cached    no holder, sealed: kept for a later match until it is evicted

    Laws: ``num_free + num_in_use + num_cached == num_blocks``; a count is never negative; a free
    block is not sealed.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0 and block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.holders = [0] * num_blocks
        self.sealed = bytearray(num_blocks)
        self.num_cached = 0
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_in_use(self) -> int:
        return self.num_blocks - len(self._free) - self.num_cached

    def allocate(self) -> int:
        """A free block, now with one holder. The caller has made sure that one is free."""
        block = self._free.pop()
        self.holders[block] = 1
        return block

    def hold(self, block: int) -> None:
        """One more holder of a block that is in use or cached."""
        if self.holders[block] == 0:
            assert self.sealed[block], f"block {block} is free and cannot be held"
            self.num_cached -= 1
        self.holders[block] += 1

    def release(self, block: int) -> None:
        """One holder fewer; without any the block is cached if sealed, else free."""
        count = self.holders[block] - 1
        assert count >= 0, f"block {block} released more often than held"
        self.holders[block] = count
        if count == 0:
            if self.sealed[block]:
                self.num_cached += 1
            else:
                self._free.append(block)

    def seal(self, block: int) -> None:
        """The block is full and from now on owned by a live node (its holder stays counted)."""
        assert self.holders[block] > 0 and not self.sealed[block]
        self.sealed[block] = 1

    def unseal(self, block: int) -> None:
        """The owning node, which is not live, gives the block up: free, unless a tail holds it."""
        assert self.sealed[block]
        self.sealed[block] = 0
        if self.holders[block] == 0:
            self.num_cached -= 1
            self._free.append(block)

    def check_invariants(self, expected_holders: list[int], expected_sealed: set[int]) -> None:
        """Raise AssertionError unless the counts equal those recomputed from outside."""
        for block in range(self.num_blocks):
            assert self.holders[block] == expected_holders[block], (
                f"block {block} counts {self.holders[block]} holders, "
                f"{expected_holders[block]} can be named"
            )
            assert bool(self.sealed[block]) == (block in expected_sealed), (
                f"block {block} sealed={bool(self.sealed[block])}, owned={block in expected_sealed}"
            )
        free = set(self._free)
        assert len(free) == len(self._free), "a block is in the free list twice"
        for block in free:
            assert not self.holders[block] and not self.sealed[block], f"free block {block} is held"
        cached = sum(1 for b in range(self.num_blocks) if self.sealed[b] and not self.holders[b])
        assert cached == self.num_cached, f"num_cached {self.num_cached}, counted {cached}"
        in_use = sum(1 for count in self.holders if count)
        assert in_use == self.num_in_use, f"num_in_use {self.num_in_use}, counted {in_use}"
