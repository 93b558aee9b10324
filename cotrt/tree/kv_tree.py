"""The KV tree: sealed blocks shared by path, tips that end in it, matching and eviction."""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Sequence as SequenceABC
from typing import TYPE_CHECKING

from cotrt.tree.block_pool import BlockPool
from cotrt.tree.sequence import Sequence

if TYPE_CHECKING:
    from cotrt.tree.tiers import Tiers

Key = tuple[int, ...]
Evictable = tuple[int, int, int, "Node"]  # kind, last_used, a tie-break; the node

# The tails of this many sequences, newest first, are looked at for a partial match at one node.
_MAX_TAILS_COMPARED = 512


class Node:
    """A run of full, immutable blocks under a parent.

    Attributes:
        parent: the node before it; None for the tree's root, which has no blocks.
        blocks: block ids; keys: the token ids of each block.
        start, end: absolute positions of its first token and after its last.
        children: child nodes by the token ids of their first block; sorted_keys: those, sorted.
        tips: sequences whose sealed part ends here (a dict used as an ordered set).
        num_live: tips, plus children that are live. A node without any is cached.
        pruned: it lost its last holder by a prune, so it is evicted first.
        last_used: clock value of the loss of its last holder.
        record_keys: keys of its first blocks, as far as a tier or a save has asked for them.
    """

    __slots__ = (
        "blocks",
        "children",
        "end",
        "keys",
        "last_used",
        "num_hashed",
        "num_live",
        "parent",
        "path_hash",
        "pruned",
        "record_keys",
        "sorted_keys",
        "start",
        "tips",
    )

    def __init__(self, parent: Node | None, start: int) -> None:
        self.parent = parent
        self.blocks: list[int] = []
        self.keys: list[Key] = []
        self.start = start
        self.end = start
        self.children: dict[Key, Node] = {}
        self.sorted_keys: list[Key] = []
        self.tips: dict[Sequence, None] = {}
        self.num_live = 0
        self.pruned = False
        self.last_used = 0
        self.path_hash = 0  # kept by counting.PathHasher: covers the first num_hashed blocks
        self.num_hashed = -1
        self.record_keys: list[bytes] = []

    def add_child(self, child: Node) -> None:
        self.children[child.keys[0]] = child
        bisect.insort(self.sorted_keys, child.keys[0])

    def remove_child(self, key: Key) -> None:
        del self.children[key]
        del self.sorted_keys[bisect.bisect_left(self.sorted_keys, key)]

    def nearest_keys(self, tokens: SequenceABC[int]) -> list[Key]:
        """At most two children's keys, among them one that begins most like `tokens`."""
        at = bisect.bisect_left(self.sorted_keys, tuple(tokens))
        return self.sorted_keys[max(0, at - 1) : at + 1]


class KVTree:
    """Sealed KV by token path, and where each sequence's KV ends.

    Laws, beside the pool's: a node's blocks are sealed; a live node holds each of its blocks
    once; ``num_live`` is the number of tips and live children that can be named; no two children
    of a node share their first block's tokens; an ancestor is never evicted before a descendant.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks, block_size)
        self.root = Node(None, 0)
        self.clock = 0
        self.version = 0  # grows when a tail becomes shared or a block is exchanged
        self.num_copies_on_write = 0
        self.num_evicted = 0
        self.tiers: Tiers | None = None  # told of what is sealed, pruned and evicted
        self._evictable: list[Evictable] = []
        self._tiebreak = itertools.count()

    # ---- tips ---------------------------------------------------------------------------------

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
        """Drop all of `seq`'s KV; its tip goes back to the root of the tree."""
        for block in seq.private:
            self.pool.release(block)
        seq.private = []
        seq.private_len = 0
        seq.hash = seq.hash_length = 0
        node = seq.node
        if node is not self.root:
            self._add_tip(seq, self.root)
            self._drop_tip(seq, node, pruned)

    def detach(self, seq: Sequence, *, pruned: bool = False) -> None:
        """`release`, and forget the sequence."""
        self.release(seq, pruned=pruned)
        self.root.tips.pop(seq, None)

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
        while node is not None and node is not self.root:
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
                self._push_evictable(node)
            node = node.parent
        if node is self.root:
            node.num_live -= 1

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
        if node.num_live == 1 and not node.children and node is not self.root:
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
            self._move_tip(seq, node)
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
        upper.last_used, upper.pruned = node.last_used, node.pruned
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

    def _push_evictable(self, node: Node) -> None:
        entry = (0 if node.pruned else 1, node.last_used, next(self._tiebreak), node)
        heapq.heappush(self._evictable, entry)
        if len(self._evictable) > 2 * self.pool.num_blocks + 64:
            # Entries go stale when their node comes into use again; no node has two that hold.
            self._evictable = [entry for entry in self._evictable if _holds_true(entry)]
            heapq.heapify(self._evictable)

    def _evict_block(self) -> None:
        """Give up the last block of the coldest cached leaf, pruned ones first."""
        while True:
            if not _holds_true(self._evictable[0]):
                heapq.heappop(self._evictable)
                continue
            node = self._evictable[0][-1]
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
                heapq.heappop(self._evictable)
                parent = node.parent
                assert parent is not None
                parent.remove_child(key)
                if parent is not self.root and not parent.num_live and not parent.children:
                    self._push_evictable(parent)
            return

    # ---- looking inside -----------------------------------------------------------------------

    def path(self, seq: Sequence) -> list[Node]:
        """Nodes from the root (left out) to the tip."""
        nodes = []
        node: Node | None = seq.node
        while node is not None and node is not self.root:
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
        while node is not None and node is not self.root and node.num_live == 1:
            alone += len(node.blocks)
            node = node.parent
        return alone

    def nodes(self) -> list[Node]:
        """Every node but the root."""
        found, stack = [], list(self.root.children.values())
        while stack:
            node = stack.pop()
            found.append(node)
            stack.extend(node.children.values())
        return found

    def check_invariants(self, sequences: SequenceABC[Sequence]) -> None:
        """Recompute every count from the nodes and from `sequences`; AssertionError if one is off.

        Args:
            sequences: every sequence that was attached and not detached.
        """
        holders, sealed = [0] * self.pool.num_blocks, set[int]()
        paths: dict[Node, list[int]] = {self.root: []}
        for node in self.nodes():  # parents first
            assert node.parent is not None
            paths[node] = paths[node.parent] + [token for ids in node.keys for token in ids]
        tips: dict[int, int] = {}
        for seq in sequences:
            assert seq in seq.node.tips, f"sequence {seq.id} is not a tip of its node"
            tips[id(seq.node)] = tips.get(id(seq.node), 0) + 1
            for block in seq.private:
                holders[block] += 1
            assert seq.num_computed <= seq.length, (
                f"sequence {seq.id}: {seq.num_computed} computed of {seq.length} tokens"
            )
            ids = seq.ids(0, seq.node.end)
            assert paths.get(seq.node) == ids, f"sequence {seq.id}: path and tokens differ"
        for node in self.nodes():
            size = self.block_size
            assert node.blocks and len(node.blocks) == len(node.keys)
            assert node.end == node.start + len(node.blocks) * size
            assert node.parent is not None and node.parent.end == node.start
            assert node.parent.children.get(node.keys[0]) is node
            assert node.sorted_keys == sorted(node.children), "sorted_keys are not the children's"
            live_children = sum(1 for c in node.children.values() if c.num_live)
            assert len(node.tips) == tips.get(id(node), 0), "a tip of no known sequence"
            assert node.num_live == len(node.tips) + live_children, (
                f"node at {node.start}: num_live {node.num_live}, "
                f"{len(node.tips)} tips and {live_children} live children can be named"
            )
            for block in node.blocks:
                assert block not in sealed, f"block {block} is owned by two nodes"
                sealed.add(block)
                holders[block] += 1 if node.num_live else 0
        self.pool.check_invariants(holders, sealed)


def _holds_true(entry: Evictable) -> bool:
    """The node is a cached leaf, and of the kind and age that it had when it was entered."""
    kind, last_used, _, node = entry
    return (
        not node.num_live
        and not node.children
        and bool(node.blocks)
        and node.last_used == last_used
        and kind == (0 if node.pruned else 1)
    )


def common_prefix(a: SequenceABC[int], b: SequenceABC[int]) -> int:
    """How many leading items `a` and `b` have in common."""
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count
