"""The scheduled part of the KV tree, path-compressed, as arrays in breadth-first order.

A run is a maximal chain of tree nodes with the same leaves below. Its tokens are read by exactly
those leaves, so runs are what the planner groups. Each leaf has a run of its own (its private
blocks, and the nodes that it alone stands on), perhaps of length 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from cotrt.plan import Int64


class PlanNode(Protocol):
    """A node of the KV tree as the planner sees it; every block in it is full."""

    @property
    def parent(self) -> PlanNode | None:
        """The node above; None for a root."""

    @property
    def blocks(self) -> Sequence[int]:
        """Block ids, in order; a root may have none."""

    @property
    def start(self) -> int:
        """Absolute position of the first token."""


@dataclass(slots=True)
class PlanLeaf:
    """One sequence of a step: where it stands in the tree, and which rows it computes.

    Attributes:
        node: the deepest node of its path.
        private_blocks: blocks that hold the positions from the node's end on.
        context_len: tokens that its last row sees, itself included.
        num_rows: its rows, the last ``num_rows`` positions of ``context_len``. The first may be
            the last position of the node itself: KV there already, computed for its logits.
    """

    node: PlanNode
    private_blocks: Sequence[int]
    context_len: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class Forest:
    """V runs in breadth-first order: a level's runs are neighbours, and so are a run's children.

    Attributes:
        chains: ``[V]`` the tree nodes of each run, top to bottom.
        leaf: ``[V]`` index of the leaf whose own run this is; -1 for a shared run.
        parent: ``[V]`` the run above; -1 for a root.
        first_child: ``[V]`` first run below; meaningless for a leaf's.
        start: ``[V]`` absolute position of the first token.
        length: ``[V]`` tokens.
        num_rows: ``[V]`` query rows of all leaves below.
        row_begin: ``[V]`` where those rows begin in ``rows``.
        rows: ``[T]`` row numbers in depth-first order: each run's rows are one slice.
        positions: ``[T]`` absolute position of each row, in the order of the rows.
        level_offsets: where each level begins; one more entry for the end.
    """

    chains: list[list[PlanNode]]
    leaf: Int64
    parent: Int64
    first_child: Int64
    start: Int64
    length: Int64
    num_rows: Int64
    row_begin: Int64
    rows: Int64
    positions: Int64
    level_offsets: list[int]


def ranges(begin: Int64, count: Int64) -> Int64:
    """``[begin[0], ..., begin[0]+count[0]-1, begin[1], ...]``."""
    ends = np.cumsum(count)
    total = int(ends[-1]) if len(ends) else 0
    values: Int64 = np.repeat(begin - (ends - count), count)
    values += np.arange(total, dtype=np.int64)
    return values


def build_forest(leaves: Sequence[PlanLeaf], block_size: int) -> Forest:
    """Path-compress the paths of ``leaves``; each tree node is visited once, without recursion."""
    chains, parents, levels = _compress(leaves)
    num_leaves = len(leaves)
    order = [item for level in levels for item in level]
    number = [0] * len(chains)
    for index, item in enumerate(order):
        number[item] = index
    parent = np.array([number[p] if (p := parents[item]) >= 0 else -1 for item in order], np.int64)
    leaf = np.array([item if item < num_leaves else -1 for item in order], np.int64)
    end = np.array(
        [
            leaves[item].context_len if item < num_leaves else _end(chains[item][-1], block_size)
            for item in order
        ],
        np.int64,
    )
    start = np.where(parent >= 0, end[parent], 0)
    level_offsets = [0]
    for level in levels:
        level_offsets.append(level_offsets[-1] + len(level))

    context_len = np.array([entry.context_len for entry in leaves], np.int64)
    rows_of_leaf = np.array([entry.num_rows for entry in leaves], np.int64)
    positions = ranges(context_len - rows_of_leaf, rows_of_leaf)
    # Of each leaf, the end of the shared run above it.
    shared_end = start[np.argsort(np.where(leaf >= 0, leaf, num_leaves))[:num_leaves]]
    assert (rows_of_leaf > 0).all(), "a leaf without rows has no place in a plan"
    assert (context_len - rows_of_leaf >= 0).all(), "more rows than positions"
    assert (context_len >= shared_end).all(), "a leaf ends inside a shared run"
    assert (context_len - rows_of_leaf >= shared_end - 1).all(), "rows inside a shared run"

    num_rows = np.where(leaf >= 0, rows_of_leaf[leaf], 0)
    first_child = np.zeros(len(order), np.int64)
    for depth in range(len(levels) - 1, 0, -1):
        low, high = level_offsets[depth], level_offsets[depth + 1]
        above = parent[low:high]
        heads = np.flatnonzero(np.diff(above, prepend=-1))
        first_child[above[heads]] = low + heads
        num_rows[above[heads]] = np.add.reduceat(num_rows[low:high], heads)
    row_begin = np.zeros(len(order), np.int64)
    for depth in range(len(levels)):
        low, high = level_offsets[depth], level_offsets[depth + 1]
        before = np.cumsum(num_rows[low:high]) - num_rows[low:high]
        if depth == 0:
            row_begin[low:high] = before
        else:
            above = parent[low:high]
            row_begin[low:high] = row_begin[above] + before - before[first_child[above] - low]

    own = np.flatnonzero(leaf >= 0)
    count = rows_of_leaf[leaf[own]]
    first_row = (np.cumsum(rows_of_leaf) - rows_of_leaf)[leaf[own]]
    rows = np.empty(len(positions), np.int64)
    rows[ranges(row_begin[own], count)] = ranges(first_row, count)
    return Forest(
        chains=[chains[item] for item in order],
        leaf=leaf,
        parent=parent,
        first_child=first_child,
        start=start,
        length=end - start,
        num_rows=num_rows,
        row_begin=row_begin,
        rows=rows,
        positions=positions,
        level_offsets=level_offsets,
    )


def in_whole_chunks(forest: Forest, chunk_tokens: int) -> Forest:
    """The forest with every shared run cut back to whole chunks, counted from position 0.

    What a run loses begins the runs below it: a chunk is shared where all of it is.
    """
    end = forest.start + forest.length
    end = np.where(forest.leaf >= 0, end, end // chunk_tokens * chunk_tokens)
    start = np.where(forest.parent >= 0, end[forest.parent], 0)
    return replace(forest, start=start, length=end - start)


def nodes_up(forest: Forest, parent: Sequence[int], run: int) -> Iterator[PlanNode]:
    """The nodes of a run and of those above it, from the bottom; ``parent`` is the forest's."""
    while run >= 0:
        yield from reversed(forest.chains[run])
        run = parent[run]


def _end(node: PlanNode, block_size: int) -> int:
    return node.start + len(node.blocks) * block_size


def _compress(
    leaves: Sequence[PlanLeaf],
) -> tuple[list[list[PlanNode]], list[int], list[list[int]]]:
    """Runs of the forest: items ``0 .. len(leaves) - 1`` are the leaves' own, the rest shared.

    Returns the nodes of each item, the item above each (-1: none), and the items level by level.
    """
    seen: dict[int, int] = {}
    nodes: list[PlanNode] = []
    above: list[int] = []  # number of the node above, -1 for a root
    uses: list[int] = []  # nodes and leaves directly below
    bottoms: list[int] = []
    for leaf in leaves:
        node = leaf.node
        number = seen.get(id(node))
        if number is not None:
            uses[number] += 1
            bottoms.append(number)
            continue
        bottoms.append(len(nodes))
        while True:
            seen[id(node)] = len(nodes)
            nodes.append(node)
            uses.append(1)
            parent = node.parent
            if parent is None:
                above.append(-1)
                break
            number = seen.get(id(parent))
            if number is not None:
                above.append(number)
                uses[number] += 1
                break
            above.append(len(nodes))
            node = parent

    chains: list[list[PlanNode]] = []
    parents: list[int] = []
    children: list[list[int]] = [[] for _ in leaves]
    item_of: dict[int, int] = {}  # branching node -> its item

    def climb(number: int, chain: list[PlanNode]) -> int:
        """Add to ``chain`` the nodes that are read by the same leaves; the fork above them."""
        while number >= 0 and uses[number] == 1:
            chain.append(nodes[number])
            number = above[number]
        chain.reverse()
        return number

    forks: list[int] = []  # of each leaf
    for bottom in bottoms:
        chain: list[PlanNode] = []
        forks.append(climb(bottom, chain))
        chains.append(chain)
    parents = [-1] * len(leaves)
    roots: list[int] = []
    for leaf_index, fork in enumerate(forks):
        item = leaf_index
        while fork >= 0:
            known = item_of.get(fork)
            if known is not None:
                parents[item] = known
                children[known].append(item)
                break
            chain = [nodes[fork]]
            next_fork = climb(above[fork], chain)
            parents[item] = item_of[fork] = len(chains)
            chains.append(chain)
            parents.append(-1)
            children.append([item])
            item, fork = parents[item], next_fork
        else:
            roots.append(item)
    levels = [roots]
    while below := [child for item in levels[-1] for child in children[item]]:
        levels.append(below)
    return chains, parents, levels
