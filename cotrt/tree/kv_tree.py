"""The KV tree: sealed blocks shared by path, tips that end in it, matching and eviction."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as SequenceABC
from typing import TYPE_CHECKING

from cotrt.tree.block_pool import BlockPool
from cotrt.tree.cold_leaves import ColdLeaves
from cotrt.tree.node import Node, common_prefix
from cotrt.tree.sequence import Sequence
from cotrt.tree.tree_laws import check_tree

if TYPE_CHECKING:
    from cotrt.tree.tiers.tiers import Tiers

# The tails of this many sequences, newest first, are looked at for a partial match at one node.
_MAX_TAILS_COMPARED = 512


class KVTree:
    """Sealed KV by token path, and where each sequence's KV ends.

    Laws, beside the pool's: a node's blocks are sealed; a live node holds each of its blocks
    once; ``num_live`` is the number of tips and live children that can be named; no two children
    of a node share their first block's tokens; an ancestor is never evicted before a descendant.

    KV that not everybody may have lies below a root of its own (`new_private_root`): a sequence
    matches, and is matched by, those of its own root only.

    Attributes:
        root: of all others.
        uncopied: copies that the step being scheduled will make before its rows, destination to
            source. Until then what a destination is to hold is in its source.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks, block_size)
        self.root = Node(None, 0)
        self._private_roots: list[Node] = []
        self.clock = 0
        self.version = 0  # grows when a tail becomes shared or a block is exchanged
        self.uncopied: dict[int, int] = {}
        self.num_copies_on_write = 0
        self.num_evicted = 0
        self.tiers: Tiers | None = None  # told of what is sealed, pruned and evicted
        self._cold = ColdLeaves(num_blocks)

    # ---- tips ---------------------------------------------------------------------------------

    def new_private_root(self, key: bytes) -> Node:
        """A root that nobody else's tokens are matched below; it lasts while it holds anything.

        Args:
            key: before its first block, in place of the tree's own (`record_keys.root_key`).
        """
        made = Node(None, 0)
        made.record_keys.append(key)
        self._private_roots.append(made)
        return made

    def _drop_empty_root(self, root: Node) -> None:
        if root is not self.root and not root.num_live and not root.children:
            self._private_roots.remove(root)

    def attach(self, seq: Sequence) -> None:
        """Make `seq`, whose ``node`` is set, a tip of that node."""
        self._add_tip(seq, seq.node)

    def fork_tip(self, source: Sequence, child: Sequence) -> None:
        """Put `child`'s tip where `source`'s is: constant time, nothing is copied."""
        self._add_tip(child, source.node)
        if source.private_len:
            tail = source.private[0]
            self.pool.hold(tail)
            child.private = [tail]
            child.private_len = source.private_len
            if source.work is not None:
                self.version += 1
        child.hash, child.hash_length = source.hash, source.hash_length

    def release(self, seq: Sequence, *, pruned: bool = False) -> None:
        """Drop all of `seq`'s KV; its tip goes back to its root."""
        for block in seq.private:
            self.pool.release(block)
        seq.private = []
        seq.private_len = 0
        seq.hash = seq.hash_length = 0
        node = seq.node
        if node is not seq.root:
            self._add_tip(seq, seq.root)
            self._drop_tip(seq, node, pruned)

    def detach(self, seq: Sequence, *, pruned: bool = False) -> None:
        """`release`, and forget the sequence."""
        self.release(seq, pruned=pruned)
        root = seq.root
        del root.tips[seq]
        root.num_live -= 1
        self._drop_empty_root(root)

    def truncate_tip(self, seq: Sequence, length: int) -> None:
        """Cut the KV to its first `length` tokens; inside a sealed block the tail is a view."""
        if length >= seq.num_computed:
            return
        seq.hash = seq.hash_length = 0
        node = seq.node
        if length >= node.end:
            keep = length - node.end
            self._trim_private(seq, -(-keep // self.block_size))
            seq.private_len = keep
            return
        target = node
        while target.start > length:
            assert target.parent is not None
            target = target.parent
        whole, rest = divmod(length - target.start, self.block_size)
        view = -1
        if rest:
            view = target.blocks[whole]
            self.pool.hold(view)
        if whole == 0:
            if target.parent is not None:
                target = target.parent
        elif whole < len(target.blocks):
            target = self._split(target, whole)
        self._trim_private(seq, 0)
        self._move_tip(seq, target)
        if rest:
            seq.private = [view]
        seq.private_len = rest

    def trim(self, seq: Sequence) -> None:
        """Give back blocks that were reserved but hold no computed token."""
        self._trim_private(seq, -(-seq.private_len // self.block_size))

    def _trim_private(self, seq: Sequence, keep: int) -> None:
        while len(seq.private) > keep:
            self.pool.release(seq.private.pop())

    def _add_tip(self, seq: Sequence, node: Node) -> None:
        node.tips[seq] = None
        seq.node = node
        self._hold(node)

    def _drop_tip(self, seq: Sequence, node: Node, pruned: bool) -> None:
        del node.tips[seq]
        self._drop(node, pruned)

    def _move_tip(self, seq: Sequence, node: Node) -> None:
        old = seq.node
        if old is not node:
            self._add_tip(seq, node)
            self._drop_tip(seq, old, pruned=False)

    def _hold(self, node: Node | None) -> None:
        while node is not None:
            node.num_live += 1
            if node.num_live > 1:
                return
            for block in node.blocks:
                self.pool.hold(block)
            node = node.parent

    def _drop(self, node: Node | None, pruned: bool) -> None:
        while node is not None and node.parent is not None:
            node.num_live -= 1
            if node.num_live > 0:
                return
            for block in node.blocks:
                self.pool.release(block)
            node.pruned = pruned
            if pruned and self.tiers is not None:
                self.tiers.pruned(node.blocks)
            self.clock += 1
            node.last_used = self.clock
            if not node.children:
                self._cold.push(node)
            node = node.parent
        if node is not None:
            node.num_live -= 1
            self._drop_empty_root(node)

    # ---- writing ------------------------------------------------------------------------------

    def blocks_needed(self, seq: Sequence, num_tokens: int) -> int:
        """Blocks that `reserve` would take for `num_tokens` more tokens."""
        need = -(-(seq.private_len + num_tokens) // self.block_size) - len(seq.private)
        if self._tail_is_shared(seq):
            need += 1
        return need

    def can_allocate(self, num_blocks: int) -> bool:
        return self.num_available >= num_blocks

    @property
    def num_available(self) -> int:
        """Blocks that can be had without taking any from a holder."""
        return self.pool.num_free + self.pool.num_cached

    def reserve(self, seq: Sequence, num_tokens: int) -> tuple[int, int] | None:
        """Give `seq` blocks for its next `num_tokens`, evicting cached ones.

        Returns:
            ``(source, destination)`` if its tail is shared and must be copied first.
        """
        copy = None
        if self._tail_is_shared(seq):
            source = seq.private[0]
            copy = (source, self.allocate())
            # All sources are read before anything is written, so a copy of a copy that is made in
            # this very step reads the first one's source.
            self.uncopied[copy[1]] = self.uncopied.get(source, source)
            seq.private[0] = copy[1]
            self.pool.release(source)
            self.num_copies_on_write += 1
        for _ in range(-(-(seq.private_len + num_tokens) // self.block_size) - len(seq.private)):
            seq.private.append(self.allocate())
        return copy

    def _tail_is_shared(self, seq: Sequence) -> bool:
        if not seq.private_len:
            return False
        tail = seq.private[0]
        return self.pool.holders[tail] > 1 or bool(self.pool.sealed[tail])

    def drop_view(self, seq: Sequence) -> bool:
        """Give up a tail that is a view of a sealed block which nobody else holds, if it is one.

        Before it is written the view would be copied; without it the sealed block can be evicted,
        and the copy's block takes the few tokens computed again.
        """
        if not seq.private_len:
            return False
        tail = seq.private[0]
        if not self.pool.sealed[tail] or self.pool.holders[tail] > 1:
            return False
        self.truncate_tip(seq, seq.node.end)
        return True

    def allocate(self) -> int:
        """A block with one holder; evicts a cached one if none is free."""
        while not self.pool.num_free:
            self._evict_block()
        return self.pool.allocate()

    def commit(self, seq: Sequence, num_tokens: int) -> None:
        """`num_tokens` more tokens of `seq` are computed: seal the blocks that are now full.

        A block whose tokens were sealed under the same path before is exchanged for that one.
        """
        seq.private_len += num_tokens
        while seq.private_len >= self.block_size:
            self._seal(seq)

    def _seal(self, seq: Sequence) -> None:
        node, block = seq.node, seq.private.pop(0)
        key = tuple(seq.span.slice_ids(node.end, node.end + self.block_size))
        seq.private_len -= self.block_size
        existing = node.children.get(key)
        if existing is not None:
            if len(existing.blocks) > 1:
                existing = self._split(existing, 1)
            self._move_tip(seq, existing)
            self.pool.release(block)
            self.version += 1
            return
        self.pool.seal(block)
        if node.num_live == 1 and not node.children and node.parent is not None:
            node.blocks.append(block)
            node.keys.append(key)
            node.end += self.block_size
            if self.tiers is not None:
                self.tiers.sealed(node)
            return
        child = Node(node, node.end)
        child.blocks.append(block)
        child.keys.append(key)
        child.end += self.block_size
        child.num_live = 1
        child.tips[seq] = None
        node.add_child(child)
        del node.tips[seq]  # num_live of `node` stays: a tip less, a live child more
        seq.node = child
        if self.tiers is not None:
            self.tiers.sealed(child)

    # ---- matching -----------------------------------------------------------------------------

    def advance(self, seq: Sequence, limit: int) -> None:
        """Move `seq`'s tip forward over KV that is there already, to at most `limit` tokens."""
        size = self.block_size
        limit = min(limit, seq.length)
        if limit <= seq.num_computed:
            return
        start = seq.node.end
        tokens = seq.span.slice_ids(start, limit)
        node, done = seq.node, 0
        while len(tokens) - done >= size:
            child = node.children.get(tuple(tokens[done : done + size]))
            if child is None:
                break
            count, most = 1, min(len(child.keys), (len(tokens) - done) // size)
            while count < most and child.keys[count] == tuple(
                tokens[done + count * size : done + (count + 1) * size]
            ):
                count += 1
            if count < len(child.blocks):
                child = self._split(child, count)
            node = child
            done += count * size
        if node is not seq.node:
            self._trim_private(seq, 0)
            seq.private_len = 0
            before = seq.node
            self._move_tip(seq, node)
            if self.tiers is not None:
                self.tiers.matched(node, before)
        self._advance_tail(seq, tokens[done : done + size])

    def _advance_tail(self, seq: Sequence, tokens: SequenceABC[int]) -> None:
        """Share the block under `seq`'s node that agrees with most of `tokens`, if it helps."""
        best, view = seq.private_len, -1
        if len(tokens) <= best:
            return
        node = seq.node
        for key in node.nearest_keys(tokens):
            common = common_prefix(key, tokens)
            if common > best:
                best, view = common, node.children[key].blocks[0]
        for other in itertools.islice(reversed(node.tips), _MAX_TAILS_COMPARED):
            if best == len(tokens):
                break
            if (
                other.private_len > best
                and other is not seq
                and other.token_at(node.end + best) == tokens[best]
            ):
                theirs = other.span.slice_ids(node.end, node.end + other.private_len)
                common = common_prefix(theirs, tokens)
                if common > best:
                    best, view = common, other.private[0]
        if view >= 0:
            self.version += 1
            self.pool.hold(view)
            self._trim_private(seq, 0)
            seq.private = [view]
            seq.private_len = best

    def _split(self, node: Node, count: int) -> Node:
        """Cut `node` after `count` blocks; returns the new upper part. Tips stay with the lower."""
        parent = node.parent
        assert parent is not None and 0 < count < len(node.blocks)
        upper = Node(parent, node.start)
        upper.blocks, upper.keys = node.blocks[:count], node.keys[:count]
        upper.end = node.start + count * self.block_size
        upper.last_used, upper.pruned, upper.noted = node.last_used, node.pruned, node.noted
        upper.num_live = 1 if node.num_live else 0
        parent.children[upper.keys[0]] = upper
        node.parent = upper
        node.blocks, node.keys = node.blocks[count:], node.keys[count:]
        node.start = upper.end
        node.num_hashed = -1
        upper.record_keys, node.record_keys = node.record_keys[:count], node.record_keys[count:]
        upper.add_child(node)
        return upper

    # ---- eviction -----------------------------------------------------------------------------

    def _evict_block(self) -> None:
        """Give up the last block of the coldest cached leaf, pruned ones first."""
        node = self._cold.coldest()
        if self.tiers is not None and not node.pruned:
            self.tiers.evicting(node)
        block = node.blocks.pop()
        key = node.keys.pop()
        del node.record_keys[len(node.blocks) :]
        node.end -= self.block_size
        node.num_hashed = -1
        self.pool.unseal(block)
        self.num_evicted += 1
        if not node.blocks:
            self._cold.pop()
            parent = node.parent
            assert parent is not None
            parent.remove_child(key)
            if parent.parent is None:
                self._drop_empty_root(parent)
            elif not parent.num_live and not parent.children:
                self._cold.push(parent)

    # ---- looking inside -----------------------------------------------------------------------

    def roots(self) -> list[Node]:
        """The root of all, and the private ones."""
        return [self.root, *self._private_roots]

    def path(self, seq: Sequence) -> list[Node]:
        """Nodes from the root (left out) to the tip."""
        nodes = []
        node: Node | None = seq.node
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def blocks_of(self, seq: Sequence) -> set[int]:
        """Ids of all blocks that hold `seq`'s KV."""
        return {b for node in self.path(seq) for b in node.blocks} | set(seq.private)

    def blocks_alone(self, seq: Sequence) -> int:
        """Blocks that nobody but `seq` holds."""
        alone = sum(1 for b in seq.private if self.pool.holders[b] == 1)
        node: Node | None = seq.node
        while node is not None and node.parent is not None and node.num_live == 1:
            alone += len(node.blocks)
            node = node.parent
        return alone

    def nodes(self) -> list[Node]:
        """Every node but the roots."""
        found = []
        stack = [child for root in self.roots() for child in root.children.values()]
        while stack:
            node = stack.pop()
            found.append(node)
            stack.extend(node.children.values())
        return found

    def check_invariants(self, sequences: SequenceABC[Sequence]) -> None:
        """Raise AssertionError where a law is broken (`tree_laws.check_tree`)."""
        check_tree(self, sequences)
