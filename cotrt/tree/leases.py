"""Leases: branches whose KV is given up last, within half of the pool."""

from __future__ import annotations

import time
from collections.abc import Iterable

from cotrt.errors import InvalidRequestError
from cotrt.tree.kv_tree import KVTree
from cotrt.tree.sequence import Sequence

# Of the pool's blocks, what leases can keep in all.
_MAX_SHARE = 0.5


def give_lease(tree: KVTree, sequences: Iterable[Sequence], seq: Sequence, until: float) -> None:
    """A lease on the KV of `seq`; one that it had ends.

    Args:
        sequences: all there are.
        until: monotonic time; the past gives the lease up.

    Raises:
        InvalidRequestError: with all other leases it would be more than half of the pool.
    """
    now = time.monotonic()
    blocks = tree.blocks_of(seq)
    for other in sequences:
        if other is not seq and not other.internal and other.keep_until > now:
            blocks |= tree.blocks_of(other)
    limit = _limit(tree)
    if until > now and len(blocks) > limit:
        raise InvalidRequestError(
            f"keep: {len(blocks)} blocks would be kept in all, the limit is {limit} of "
            f"{tree.pool.num_blocks}: keep fewer branches, or enlarge the pool"
        )
    tree.clock += 1
    seq.keep_until, seq.kept_at = until, tree.clock


def with_lease(tree: KVTree, sequences: Iterable[Sequence]) -> set[Sequence]:
    """Those whose lease counts: the oldest, as far as they fit in half of the pool now.

    Branches grow after their lease was given; what the engine holds for itself counts always.
    """
    now = time.monotonic()
    leased = [seq for seq in sequences if seq.keep_until > now]
    leased.sort(key=lambda seq: seq.kept_at)
    found, blocks = set[Sequence](), set[int]()
    for seq in leased:
        more = blocks if seq.internal else blocks | tree.blocks_of(seq)
        if len(more) <= _limit(tree):
            found.add(seq)
            blocks = more
    return found


def _limit(tree: KVTree) -> int:
    return int(tree.pool.num_blocks * _MAX_SHARE)
