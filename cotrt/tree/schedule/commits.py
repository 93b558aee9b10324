"""What a step has computed or loaded becomes visible to everybody."""

from __future__ import annotations

from collections.abc import Collection

from cotrt.tree.kv_tree import KVTree
from cotrt.tree.schedule.step import LoadEntry, Step
from cotrt.tree.schedule.work import WorkState
from cotrt.tree.sequence import Sequence


def commit_decode(tree: KVTree, step: Step) -> None:
    """Every row of a decode step is a token more of its work's tail."""
    for entry in step.entries:
        if entry.work.state is WorkState.RUNNING:
            seq = entry.work.seq
            seq.private_len += 1
            if seq.private_len == tree.block_size:
                tree.commit(seq, 0)


def commit_any(tree: KVTree, step: Step, failed: Collection[bytes]) -> None:
    """Rows, loads, and works that took another's rows; works that have ended are left out.

    Args:
        tree: the tree.
        step: what has run.
        failed: keys of records that could not be read.
    """
    for entry in step.entries:
        work, seq = entry.work, entry.work.seq
        if work.state is not WorkState.RUNNING:
            continue
        tree.commit(seq, entry.num_new)
        tree.trim(seq)
        seq.hash = int(step.hashes[entry.first_row + entry.num_rows - 1])
        seq.hash_length = seq.num_computed
        if seq.num_computed == work.target:
            _share_with_ancestors(tree, seq)
    for load in step.loads:
        if load.work.state is WorkState.RUNNING:
            _commit_load(tree, load, failed)
    for work in step.joined:
        if work.state is WorkState.RUNNING:
            tree.advance(work.seq, work.target)


def _commit_load(tree: KVTree, entry: LoadEntry, failed: Collection[bytes]) -> None:
    work, load, tiers = entry.work, entry.load, tree.tiers
    assert tiers is not None
    sizes = entry.sizes
    for index, key in enumerate(entry.keys):
        if key in failed:
            sizes = sizes[:index]
            tiers.counters.failed_loads += 1
            work.load = None
            break
    tiers.loaded(load, len(sizes), sum(sizes))
    tree.commit(work.seq, sum(sizes))
    tree.trim(work.seq)
    if load.at == len(load.keys):
        work.load = None
    if work.seq.num_computed >= work.target:
        _share_with_ancestors(tree, work.seq)


def _share_with_ancestors(tree: KVTree, seq: Sequence) -> None:
    """Living, idle ancestors that lack KV of the same tokens take it along."""
    parent = seq.parent
    while parent is not None and not parent.pruned and not parent.closed:
        if parent.num_computed >= parent.length or parent.work is not None:
            return
        tree.advance(parent, parent.length)
        parent = parent.parent
