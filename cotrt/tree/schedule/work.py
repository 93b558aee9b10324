"""What is asked of a sequence: tokens to compute, logits wanted, and where it stands."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

from cotrt.tree.sequence import Sequence

if TYPE_CHECKING:
    from cotrt.tree.tiers.tiers import Load

Rank = tuple[int, tuple[int, ...], int]


class WorkState(enum.Enum):
    """Life of a work: WAITING -> RUNNING -> DONE, and back to WAITING when it is preempted."""

    WAITING = enum.auto()  # not scheduled, or following another that computes its prefix
    RUNNING = enum.auto()  # scheduled in every step until it is done or preempted
    DONE = enum.auto()  # finished, cancelled or failed; steps in flight drop what they bring


class Work:
    """One generate or score on one sequence.

    `num_computed` of the sequence chases `target`. Where `samples`, the logits of the last token
    are drawn from. Logits at the positions from `logits_from` on that come before score the given
    token that follows each; without `samples` all of them do.

    Attributes:
        rank: order among works: priority (lower first), depth-first place, then age. It never
            changes, so the first running work always goes on and preemption cannot circle.
        leader: the work that is computing this one's prefix now, or None.
        wait_until: length of the prefix that the leader computes for this one.
        counts_reuse: False for all but the first work of a score or choose, which count once.
        num_reused: tokens whose KV was there, or being computed, when first scheduled; None
            before that.
        num_preempted: how often its KV was dropped to make room for others.
        load: records of its next tokens, which it takes in before it computes; None without any.
        num_searched: its computed tokens when no record was found; -1 before the first search.
        data: the engine's own record (parameters, collected output).
    """

    NO_SCORES = 1 << 62

    __slots__ = (
        "data",
        "leader",
        "load",
        "logits_from",
        "num_preempted",
        "num_searched",
        "counts_reuse",
        "num_reused",
        "rank",
        "samples",
        "seq",
        "state",
        "wait_until",
    )

    def __init__(
        self,
        seq: Sequence,
        *,
        samples: bool,
        logits_from: int,
        priority: int,
        number: int,
        data: Any,
    ) -> None:
        self.seq = seq
        self.samples = samples
        self.logits_from = logits_from
        self.rank: Rank = (priority, seq.order, number)
        self.state = WorkState.WAITING
        self.leader: Work | None = None
        self.wait_until = 0
        self.counts_reuse = True
        self.num_reused: int | None = None
        self.num_preempted = 0
        self.load: Load | None = None
        self.num_searched = -1
        self.data = data

    @property
    def target(self) -> int:
        """Tokens to be computed: all, or all but the last where that one is only scored."""
        return self.seq.length if self.samples else self.seq.length - 1

    @property
    def first_wanted(self) -> int:
        """The first position whose logits are still wanted."""
        return min(self.logits_from, self.target - 1)

    @property
    def match_limit(self) -> int:
        """Leading tokens whose KV may be taken from elsewhere: later ones need logits."""
        return self.first_wanted + 1

    @property
    def is_satisfied(self) -> bool:
        """Nothing is left to compute or to score."""
        return not self.samples and self.logits_from >= self.target
