"""Which cached block goes first."""

from __future__ import annotations

import heapq
import itertools

from cotrt.tree.node import Node

_Entry = tuple[int, int, int, Node]  # kind, last_used, a tie-break; the node


class ColdLeaves:
    """Cached leaves of the tree: what was pruned first, then what has been unused for longest.

    A heap whose entries go stale when their node comes into use again; no node has two that hold.

    Args:
        num_blocks: of the pool, which bounds the entries that hold.
    """

    def __init__(self, num_blocks: int) -> None:
        self._heap: list[_Entry] = []
        self._limit = 2 * num_blocks + 64
        self._tiebreak = itertools.count()

    def __len__(self) -> int:
        """Entries, stale ones too."""
        return len(self._heap)

    def push(self, node: Node) -> None:
        """`node` has become a cached leaf."""
        entry = (0 if node.pruned else 1, node.last_used, next(self._tiebreak), node)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > self._limit:
            self._heap = [entry for entry in self._heap if _holds_true(entry)]
            heapq.heapify(self._heap)

    def coldest(self) -> Node:
        """The one to take a block from; there is one."""
        while not _holds_true(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][-1]

    def pop(self) -> None:
        """The coldest has no blocks any more."""
        heapq.heappop(self._heap)


def _holds_true(entry: _Entry) -> bool:
    """The node is a cached leaf, and of the kind and age that it had when it was entered."""
    kind, last_used, _, node = entry
    return (
        not node.num_live
        and not node.children
        and bool(node.blocks)
        and node.last_used == last_used
        and kind == (0 if node.pruned else 1)
    )
