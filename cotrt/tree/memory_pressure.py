"""Making room: idle branches give up their KV first, then running works of lower rank."""

from __future__ import annotations

import time
from collections.abc import Iterable

from cotrt.tree.kv_tree import KVTree
from cotrt.tree.sequence import Sequence
from cotrt.tree.work import Work, WorkState


def holds_kv(seq: Sequence) -> bool:
    return bool(seq.private) or seq.node.parent is not None


def reclaim_idle(tree: KVTree, sequences: Iterable[Sequence], num_blocks: int) -> bool:
    """Release KV of branches without running work until `num_blocks` can be allocated.

    Kept branches (leases) go last, then the longest unused go first; those that hold blocks
    alone go before those whose blocks others hold too. Their tokens stay, so nothing is lost.

    Returns:
        True if `num_blocks` can be allocated now.
    """
    now = time.monotonic()
    idle = [
        seq
        for seq in sequences
        if (seq.work is None or seq.work.state is not WorkState.RUNNING) and holds_kv(seq)
    ]
    idle.sort(key=lambda seq: (seq.keep_until > now, seq.last_used))
    for only_alone in (True, False):
        for seq in idle:
            if tree.can_allocate(num_blocks):
                return True
            if holds_kv(seq) and not (only_alone and tree.blocks_alone(seq) == 0):
                tree.release(seq)
    return tree.can_allocate(num_blocks)


def choose_victim(tree: KVTree, running: list[Work], below: Work) -> Work | None:
    """The running work ranked after `below` that holds most blocks alone (the last on a tie)."""
    best, best_alone = None, -1
    for work in reversed(running):
        if work.rank <= below.rank:
            break
        alone = tree.blocks_alone(work.seq)
        if alone > best_alone:
            best, best_alone = work, alone
    return best
