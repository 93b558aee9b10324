"""Leaders: whose rows a waiting work can wait for, or take its logits from."""

from __future__ import annotations

from cotrt.tree.node import common_prefix
from cotrt.tree.schedule.step import Entry
from cotrt.tree.schedule.step_builder import StepBuilder
from cotrt.tree.schedule.work import Work, WorkState

# This many works at one node are asked whether they compute a waiting work's prefix.
_MAX_LEADERS_ASKED = 512


def is_ahead(leader: Work, work: Work) -> bool:
    """`leader` still computes tokens that `work` waits for."""
    return leader.state is WorkState.RUNNING and leader.seq.num_computed < work.wait_until


def find_leader(builder: StepBuilder, work: Work, *, any_root: bool) -> Entry | None:
    """The entry that computes, or has the logits of, most of what `work` needs next.

    Sets ``work.wait_until`` to the length of the prefix that both have in common.

    Args:
        builder: the step so far.
        any_root: works of other roots may lead.
    """
    seq, wanted = work.seq, work.first_wanted
    base, target = seq.node.end, work.target
    best, best_entry = (False, seq.num_computed), None
    mine: list[int] | None = None
    # Whoever is of use has this token too: most others are told apart by it.
    first = min(wanted, seq.num_computed)
    first_token = seq.token_at(first)
    for entry in builder.by_node.get(seq.node, ())[:_MAX_LEADERS_ASKED]:
        other = entry.work.seq
        if not any_root and other.order[0] != seq.order[0]:
            continue
        if other.length <= first or other.token_at(first) != first_token:
            continue
        # Past a logits row that is wanted and not brought, its KV is of no use.
        limit = target if wanted >= entry.start else work.match_limit
        stop = min(limit, entry.work.target)
        if mine is None:
            mine = seq.ids(base, target)
        theirs = other.ids(base, stop)
        if theirs != mine[: stop - base]:
            stop = base + common_prefix(theirs, mine)
        gives = entry.start <= wanted < min(entry.end, stop)
        if (gives, stop) > best:
            best, best_entry = (gives, stop), entry
        if best == (True, target):
            break
    if best_entry is not None:
        work.wait_until = best[1]
    return best_entry
