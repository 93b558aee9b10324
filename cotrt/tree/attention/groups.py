"""Which runs are read together: the exact optimum over every split and merge of the forest.

For each edge of the forest there are two choices. Split: the rows below the child are in a group
that ends at the parent, and in another one further down; every row then costs one partial more.
Merge: the parent's blocks are read again together with the child's.

A run at depth k can be reached in k + 1 states: its j nearest ancestors (0 <= j <= k) are merged
into it, and the rows are split already exactly when j < k. So the dynamic program holds k + 1
numbers a run:

    leaf:    cost(v, j) = (ancestors(v, j) + length) * kv + overhead + [j < k] * partial * rows
    shared:  cost(v, j) = min(sum over c of cost(c, j + 1),
                              (ancestors(v, j) + length) * kv + overhead
                              + sum over c of min(cost(c, j + 1), cost(c, 0) + partial * rows(c)))

In a deterministic plan a group that does not begin at position 0 is cut into chunks, and a row has
a partial of each: ``partial`` is then multiplied by ``pieces(v, j)``, their number, 1 where j = k.

A leaf with no token of its own has no group below the one that ends at its parent: there it costs
[j < k] * partial * rows only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cotrt.plan import Int64
from cotrt.tree.attention.costs import PlanCosts
from cotrt.tree.attention.forest import Forest

_NEVER = np.int64(1) << 60
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Choice:
    """For each of the V runs of a forest, in its order.

    Attributes:
        merged: how many of the nearest ancestors are read together with the run.
        split: whether its rows are also in the group that ends at its parent.
        is_end: whether a group ends here.
    """

    merged: Int64
    split: Bools
    is_end: Bools


def plain_choice(forest: Forest) -> Choice:
    """One group a leaf: nothing is shared."""
    merged = np.zeros(len(forest.leaf), np.int64)
    for depth in range(len(forest.level_offsets) - 1):
        merged[forest.level_offsets[depth] : forest.level_offsets[depth + 1]] = depth
    return Choice(merged, np.zeros(len(merged), np.bool_), forest.leaf >= 0)


def choose_groups(
    forest: Forest, costs: PlanCosts, *, merges_anyway: bool = False, chunk_tokens: int = 0
) -> Choice:
    """The choice of least cost; the plain one where that does not pay for there being a merge.

    Args:
        forest: what is scheduled.
        costs: the backend's constants.
        merges_anyway: the plain plan has a merge too, as it is split along KV.
        chunk_tokens: of a deterministic plan, whose forest is `in_whole_chunks`; else 0.
    """
    num_levels = len(forest.level_offsets) - 1
    plain = plain_choice(forest)
    if num_levels == 1:
        return plain
    splits, shared_cost = _solve(forest, costs, chunk_tokens)
    own = forest.leaf >= 0
    path_len = (forest.start + forest.length)[own]
    plain_cost = int(path_len.sum()) * costs.kv_bytes_per_token
    plain_cost += int(own.sum()) * costs.group_overhead_bytes
    if not merges_anyway:
        shared_cost += costs.merge_overhead_bytes
    if shared_cost >= plain_cost:
        return plain

    merged = np.zeros(len(own), np.int64)
    split = np.zeros(len(own), np.bool_)
    is_end = own.copy()
    for depth in range(1, num_levels):
        low, high = forest.level_offsets[depth], forest.level_offsets[depth + 1]
        above = forest.parent[low:high]
        chosen = splits[depth - 1][np.arange(high - low), merged[above]]
        split[low:high] = chosen
        merged[low:high] = np.where(chosen, 0, merged[above] + 1)
        is_end[above[chosen]] = True
    is_end[split & own & (forest.length == 0)] = False
    return Choice(merged, split, is_end)


def _solve(forest: Forest, costs: PlanCosts, chunk_tokens: int) -> tuple[list[Bools], int]:
    """Bottom up: ``splits[k][c, j]``, run c of level k + 1 below a parent in state j; the cost."""
    offsets = forest.level_offsets
    num_levels = len(offsets) - 1
    kv, partial = costs.kv_bytes_per_token, costs.partial_bytes_per_row
    own = forest.leaf >= 0
    # reach[k][v, j]: tokens of the run and its j nearest ancestors
    reach = [forest.length[: offsets[1], None]]
    for depth in range(1, num_levels):
        low, high = offsets[depth], offsets[depth + 1]
        level = np.empty((high - low, depth + 1), np.int64)
        level[:, 0] = 0
        level[:, 1:] = reach[-1][forest.parent[low:high] - offsets[depth - 1]]
        level += forest.length[low:high, None]
        reach.append(level)

    splits: list[Bools] = [np.zeros((0, 0), np.bool_)] * (num_levels - 1)
    below = np.zeros((0, 0), np.int64)
    for depth in range(num_levels - 1, -1, -1):
        low, high = offsets[depth], offsets[depth + 1]
        cost = reach[depth] * kv + costs.group_overhead_bytes
        inner = np.flatnonzero(~own[low:high])
        group = np.where(reach[depth][inner] > 0, cost[inner], _NEVER)
        pieces = np.ones_like(cost)
        if chunk_tokens:
            pieces[:, :depth] = np.maximum(-(-reach[depth][:, :depth] // chunk_tokens), 1)
        cost[:, :depth] += (forest.num_rows[low:high] * partial)[:, None] * pieces[:, :depth]
        if len(inner):
            child_low, child_high = offsets[depth + 1], offsets[depth + 2]
            heads = forest.first_child[low + inner] - child_low
            num_children = np.diff(heads, append=len(below))
            partials = (forest.num_rows[child_low:child_high] * partial)[:, None]
            partials = partials * np.repeat(pieces[inner], num_children, axis=0)
            merge = below[:, 1:]
            split = below[:, :1] + partials
            bare = own[child_low:child_high] & (forest.length[child_low:child_high] == 0)
            if bare.any():
                split[bare] = partials[bare]
                split[bare, depth] = 0  # in no other group: written straight to the output
            all_merge = np.add.reduceat(merge, heads, axis=0)
            with_group = group + np.add.reduceat(np.minimum(merge, split), heads, axis=0)
            has_group = with_group < all_merge
            cost[inner] = np.where(has_group, with_group, all_merge)
            splits[depth] = np.repeat(has_group, num_children, axis=0) & (split < merge)
        below = cost
    return splits, int(below.sum())
