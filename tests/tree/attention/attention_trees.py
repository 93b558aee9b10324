"""Trees for the planner's tests, and what a plan must be, written down naively."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from cotrt.plan import AttentionPlan
from cotrt.tree.attention.planner import PlanCosts, PlanLeaf

COSTS = PlanCosts.for_heads(32, 8, 128, 2)  # the constants of the byte model in bfloat16


@dataclass
class Node:
    parent: Node | None
    blocks: list[int]
    start: int
    below: list[Node | PlanLeaf] = field(default_factory=list)


@dataclass
class Tree:
    """Builds nodes and leaves over fresh block ids."""

    block_size: int
    next_block: int = 1
    leaves: list[PlanLeaf] = field(default_factory=list)
    roots: list[Node] = field(default_factory=list)

    def take(self, count: int) -> list[int]:
        self.next_block += count
        return list(range(self.next_block - count, self.next_block))

    def node(self, parent: Node | None, num_blocks: int) -> Node:
        start = 0 if parent is None else self.end(parent)
        made = Node(parent, self.take(num_blocks), start)
        (self.roots if parent is None else parent.below).append(made)
        return made

    def end(self, node: Node) -> int:
        return node.start + len(node.blocks) * self.block_size

    def leaf(self, node: Node, tokens: int, num_rows: int = 1) -> PlanLeaf:
        blocks = self.take(-(-tokens // self.block_size))
        made = PlanLeaf(node, blocks, self.end(node) + tokens, num_rows)
        self.leaves.append(made)
        node.below.append(made)
        return made

    def grow(self) -> list[tuple[int, int]]:
        """Every leaf one token longer; ``(leaf index, block id)`` of those that begin a block."""
        new_blocks = []
        for index, leaf in enumerate(self.leaves):
            leaf.context_len += 1
            if leaf.context_len > self.end(leaf.node) + len(leaf.private_blocks) * self.block_size:
                block = self.take(1)[0]
                leaf.private_blocks = [*leaf.private_blocks, block]
                new_blocks.append((index, block))
        return new_blocks


def level_tree(widths: list[int], lengths: list[int], block_size: int) -> Tree:
    """``widths[k]`` nodes of ``lengths[k]`` tokens at level k, children evenly; leaves last."""
    tree = Tree(block_size)
    nodes = [tree.node(None, lengths[0] // block_size) for _ in range(widths[0])]
    for width, length in zip(widths[1:-1], lengths[1:-1], strict=True):
        each = width // len(nodes)
        nodes = [tree.node(n, length // block_size) for n in nodes for _ in range(each)]
    for index in range(widths[-1]):
        tree.leaf(nodes[index * len(nodes) // widths[-1]], lengths[-1])
    return tree


@st.composite
def small_trees(draw: st.DrawFn, multi_row: bool = False, max_edges: int = 9) -> Tree:
    tree = Tree(block_size=draw(st.sampled_from([2, 4])))
    edges = 0
    for _ in range(draw(st.integers(1, 2))):
        nodes = [tree.node(None, draw(st.integers(0, 6)))]
        while nodes:
            node = nodes.pop()
            for _ in range(draw(st.integers(1, 3))):
                edges += 1
                if edges < max_edges - 3 and draw(st.booleans()):
                    nodes.append(tree.node(node, draw(st.integers(1, 6))))
                    continue
                least = 0 if tree.end(node) > 0 else 1
                tokens = draw(st.one_of(st.just(least), st.integers(least, 12)))
                rows = 1
                if multi_row and tokens:
                    rows = draw(st.integers(1, tokens + (1 if tree.end(node) > 0 else 0)))
                tree.leaf(node, tokens, rows)
    order = draw(st.permutations(tree.leaves))
    tree.leaves = list(order)
    return tree


cost_constants = st.builds(
    PlanCosts,
    kv_bytes_per_token=st.integers(1, 5),
    partial_bytes_per_row=st.integers(0, 30),
    group_overhead_bytes=st.integers(0, 20),
    merge_overhead_bytes=st.sampled_from([0, 0, 7, 60]),
)


def path_blocks(leaf: PlanLeaf) -> list[int]:
    """The whole block table of a leaf."""
    chain: list[list[int]] = [list(leaf.private_blocks)]
    node = leaf.node
    while node is not None:
        chain.append(list(node.blocks))
        node = node.parent
    return [block for blocks in reversed(chain) for block in blocks]


def check_plan(plan: AttentionPlan, leaves: list[PlanLeaf], block_size: int) -> None:
    """Every row reads exactly its own positions, each once, from its own blocks, in order."""
    assert plan.group_block_offsets[0] == 0
    assert plan.group_block_offsets[-1] == len(plan.group_blocks)
    assert plan.group_row_offsets[0] == 0 and plan.group_row_offsets[-1] == len(plan.group_rows)
    assert plan.row_partial_offsets[-1] == len(plan.row_partials)
    held = np.diff(plan.group_block_offsets) * block_size
    assert (plan.group_len <= held).all() and (np.diff(plan.group_row_offsets) > 0).all()
    group_of_slot = np.repeat(np.arange(plan.num_groups), np.diff(plan.group_row_offsets))
    slots_of_row: dict[int, list[int]] = {}
    for slot, row in enumerate(plan.group_rows.tolist()):
        slots_of_row.setdefault(row, []).append(slot)
    tables = [path_blocks(leaf) for leaf in leaves]
    row = 0
    for leaf, table in zip(leaves, tables, strict=True):
        for position in range(leaf.context_len - leaf.num_rows, leaf.context_len):
            assert plan.query_positions[row] == position
            low, high = plan.row_partial_offsets[row : row + 2]
            named = plan.row_partials[low:high].tolist()
            slots = slots_of_row[row]
            assert named == ([-1] if len(slots) == 1 else slots)
            seen: list[tuple[int, int]] = []  # position, block
            for slot in slots:
                group = int(group_of_slot[slot])
                begin, length = int(plan.group_start[group]), int(plan.group_len[group])
                if plan.group_causal[group]:
                    length = max(0, min(length, position + 1 - begin))
                entry = int(plan.group_block_offsets[group])
                assert begin % block_size == 0
                for offset in range(length):
                    block = int(plan.group_blocks[entry + offset // block_size])
                    seen.append((begin + offset, block))
            assert seen == [(p, table[p // block_size]) for p in range(position + 1)]
            row += 1
    assert row == plan.num_rows


def brute_force_cost(tree: Tree, costs: PlanCosts) -> int:
    """The least cost over every split and merge of every edge, by listing them all."""
    edges: list[tuple[Node, Node | PlanLeaf]] = []
    stack = list(tree.roots)
    while stack:
        node = stack.pop()
        for child in node.below:
            edges.append((node, child))
            if isinstance(child, Node):
                stack.append(child)
    best = None
    for choice in itertools.product((False, True), repeat=len(edges)):
        split = {id(child): s for (_, child), s in zip(edges, choice, strict=True)}
        cost = _cost_of(tree, split, costs)
        if cost is not None and (best is None or cost < best):
            best = cost
    assert best is not None
    return best


def _cost_of(tree: Tree, split: dict[int, bool], costs: PlanCosts) -> int | None:
    """Cost of one assignment; None where it makes a group of no tokens above the leaves."""
    groups: dict[tuple[int, ...], int] = {}  # ids of the chain -> tokens
    partials = 0
    for leaf in tree.leaves:
        own_len = leaf.context_len - tree.end(leaf.node)
        path: list[Node | PlanLeaf] = [leaf]
        node: Node | None = leaf.node
        while node is not None:
            path.append(node)
            node = node.parent
        path.reverse()
        chains: list[list[Node | PlanLeaf]] = [[path[0]]]
        for item in path[1:]:
            if split[id(item)]:
                chains.append([item])
            else:
                chains[-1].append(item)
        count = 0
        for chain in chains:
            tokens = sum(
                own_len if item is leaf else len(item.blocks) * tree.block_size  # type: ignore[union-attr]
                for item in chain
            )
            if tokens == 0:
                if chain[-1] is leaf:
                    continue  # no token of its own: no group below
                return None
            count += 1
            groups[tuple(id(item) for item in chain)] = tokens
        partials += count if count > 1 else 0
    total = sum(groups.values()) * costs.kv_bytes_per_token
    total += len(groups) * costs.group_overhead_bytes + partials * costs.partial_bytes_per_row
    return total + (costs.merge_overhead_bytes if partials else 0)
