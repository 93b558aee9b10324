"""Making room: idle branches give up their KV first, then running works of lower rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from cotrt.tree.kv_tree import KVTree
from cotrt.tree.leases import with_lease
from cotrt.tree.schedule.work import Work, WorkState
from cotrt.tree.sequence import Sequence


def holds_kv(seq: Sequence) -> bool:
    return bool(seq.private) or seq.node.parent is not None


def reclaim_idle(tree: KVTree, sequences: Iterable[Sequence], fits: Callable[[], bool]) -> bool:
    """Release KV of branches without running work until ``fits()``.

    Those with a lease go last; those that hold blocks alone go before those whose blocks others
    hold too; among them the longest unused go first. Their tokens stay, so nothing is lost.

    Args:
        fits: asked again after each release, for that may also end the sharing of a tail, which
            then need not be copied.

    Returns:
        True if it fits now.
    """
    idle = [
        seq
        for seq in sequences
        if (seq.work is None or seq.work.state is not WorkState.RUNNING) and holds_kv(seq)
    ]
    idle.sort(key=lambda seq: seq.last_used)
    kept = with_lease(tree, idle)
    for some in ([seq for seq in idle if seq not in kept], [seq for seq in idle if seq in kept]):
        for only_alone in (True, False):
            for seq in some:
                if fits():
                    return True
                if holds_kv(seq) and not (only_alone and tree.blocks_alone(seq) == 0):
                    give_up(tree, seq)
    return fits()


def give_up(tree: KVTree, seq: Sequence) -> None:
    """Release a living sequence's KV for others; a tier may keep what nobody else holds."""
    if tree.tiers is not None:
        tree.tiers.releasing(seq, tree.uncopied)
    tree.release(seq)


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
