"""A node of the KV tree: a run of sealed blocks."""

from __future__ import annotations

import bisect
from collections.abc import Sequence as SequenceABC
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cotrt.tree.sequence import Sequence

Key = tuple[int, ...]


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
        noted: when its records were last said to be used, in seconds of the tiers' clock.
        record_keys: keys of its first blocks, as far as a tier or a save has asked for them.
    """

    __slots__ = (
        "blocks",
        "children",
        "end",
        "keys",
        "last_used",
        "noted",
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
        self.noted = float("-inf")
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


def common_prefix(a: SequenceABC[int], b: SequenceABC[int]) -> int:
    """How many leading items `a` and `b` have in common."""
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count
