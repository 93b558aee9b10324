"""The laws of the KV tree, recomputed from outside."""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC
from typing import TYPE_CHECKING

from cotrt.tree.node import Node
from cotrt.tree.sequence import Sequence

if TYPE_CHECKING:
    from cotrt.tree.kv_tree import KVTree


def check_tree(tree: KVTree, sequences: SequenceABC[Sequence]) -> None:
    """Recompute every count from the nodes and from `sequences`; AssertionError if one is off.

    Args:
        sequences: every sequence that was attached and not detached.
    """
    holders, sealed = [0] * tree.pool.num_blocks, set[int]()
    paths: dict[Node, list[int]] = {root: [] for root in tree.roots()}
    for node in tree.nodes():  # parents first
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
        top = seq.node
        while top.parent is not None:
            top = top.parent
        assert top is seq.root, f"sequence {seq.id} has KV below a root that is not its own"
    for root in tree.roots():
        live = len(root.tips) + sum(1 for child in root.children.values() if child.num_live)
        assert root.num_live == live, f"a root's num_live is {root.num_live}, {live} can be named"
        assert root is tree.root or live or root.children, "a private root that holds nothing"
    for node in tree.nodes():
        size = tree.block_size
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
    tree.pool.check_invariants(holders, sealed)
