"""A sequence: the tokens of one branch, and the tip that says where their KV lies."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from cotrt.tree.tokens import TokenSpan

if TYPE_CHECKING:
    from cotrt.tree.node import Node
    from cotrt.tree.schedule.work import Work

# Depth-first order is kept exactly down to this depth; deeper sequences sort with their ancestor.
_ORDER_DEPTH = 48

# Forks of one sequence are not looked through for dead ones while they are fewer.
_MIN_SWEPT = 16


class Sequence:
    """Tokens that grow, and the *tip* of their KV: a node, and private blocks after its end.

        root ── node ── node        private: [tail][block being filled]
        └──── full, shared ────┘    └ private_len tokens are computed here ┘

    KV of positions ``0 .. num_computed - 1`` is there. Between steps `private` holds at most one
    block (the tail), which other sequences may hold too until one of them writes.

    Attributes:
        id: unique in the engine, growing.
        span: the tokens; ``length`` of them.
        node: the tree node in which the shared, sealed part of the KV ends.
        root: the root that it lies below; forks have their parent's.
        private: blocks after the node's end, in order of position.
        private_len: computed tokens in `private`.
        parent: the sequence it was forked from, or None.
        forks: its forks, oldest first, held weakly; the dead are swept out now and then.
        num_forks: forks ever made of it; the next child's fork number.
        seed, epoch: keys of its draws; a truncate that removes tokens raises the epoch.
        order: depth-first position in the forest, for sorting.
        work: the work that makes it busy (generate or choose), or None.
        choice: the choose that makes it busy, or None.
        ended_at: its length when a generation last ended by end-of-sequence, else -1.
        last_used: clock value of its last use, for eviction.
        keep_until, kept_at: monotonic time until which its KV is evicted last; clock value at which
            that lease was given.
        pruned: it refuses everything but its properties.
        handle: the `HandleRef` of its handle, or None.
        closed: its handle was given up; it lives on for descendants and running work.
        internal: a temporary of the engine (scoring), invisible to the program.
        grammar: (structured_outputs, position) of the last generate that followed a grammar, for
            one that goes on with it; inherited by forks.
        num_restorable: leading tokens whose KV it had when it last gave that up for others; where
            prompts are not matched, no more than these are taken from a tier.
        hash, hash_length: path hash of the first hash_length tokens (see schedule/counting.py).
    """

    __slots__ = (
        "__weakref__",
        "closed",
        "depth",
        "epoch",
        "fork_length",
        "forks",
        "grammar",
        "handle",
        "hash",
        "hash_length",
        "id",
        "internal",
        "keep_until",
        "kept_at",
        "last_used",
        "metadata",
        "node",
        "num_forks",
        "num_restorable",
        "choice",
        "ended_at",
        "order",
        "parent",
        "private",
        "private_len",
        "pruned",
        "root",
        "seed",
        "span",
        "sweep_at",
        "work",
    )

    def __init__(
        self,
        number_in_engine: int,
        span: TokenSpan,
        node: Node,
        *,
        seed: int,
        parent: Sequence | None = None,
        number: int = 0,
        internal: bool = False,
    ) -> None:
        self.id = number_in_engine
        self.span = span
        self.node = node
        self.root: Node = node if parent is None else parent.root
        self.private: list[int] = []
        self.private_len = 0
        self.parent = parent
        self.forks: list[weakref.ref[Sequence]] | None = None
        self.sweep_at = _MIN_SWEPT
        self.num_forks = 0
        self.num_restorable = 0
        self.fork_length = span.start
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.seed = seed
        self.epoch = 0
        if parent is None:
            self.order: tuple[int, ...] = (number,)
        elif len(parent.order) < _ORDER_DEPTH:
            self.order = (*parent.order, number)
        else:
            self.order = parent.order
        self.work: Work | None = None
        self.choice: Any = None
        self.ended_at = -1
        self.last_used = 0
        self.keep_until = 0.0
        self.kept_at = 0
        self.pruned = False
        self.closed = False
        self.internal = internal
        self.handle: Any = None
        self.grammar: tuple[Any, int] | None = None
        self.hash = 0
        self.hash_length = 0
        self.metadata: dict[str, Any] | None = None

    @property
    def length(self) -> int:
        """Tokens, computed or not."""
        return self.span.start + len(self.span.ids)

    @property
    def is_busy(self) -> bool:
        """A generate or a choose is running on it."""
        return self.work is not None or self.choice is not None

    @property
    def num_computed(self) -> int:
        """Leading tokens whose KV is there."""
        return self.node.end + self.private_len

    def token_at(self, position: int) -> int:
        """The token id at absolute `position`."""
        span = self.span
        index = position - span.start
        return span.ids[index] if index >= 0 else span.slice_ids(position, position + 1)[0]

    def ids(self, start: int = 0, stop: int | None = None) -> list[int]:
        """Token ids at absolute positions `start` to `stop` (default: all)."""
        return self.span.slice_ids(start, self.length if stop is None else stop)

    def living_children(self, *, internal: bool = False) -> list[Sequence]:
        """Forks that are not pruned, in the order of their making; `internal` ones if asked."""
        if self.forks is None:
            return []
        alive = (reference() for reference in self.forks)
        found = [c for c in alive if c is not None and not c.pruned]
        return found if internal else [c for c in found if not c.internal]

    def adopt_child(self, child: Sequence) -> None:
        """Remember a fork that was made just now; amortised constant time."""
        # No WeakValueDictionary: its callback is Python code, which runs wherever a sequence dies.
        if self.forks is None:
            self.forks = []
        elif len(self.forks) >= self.sweep_at:
            self.forks = [reference for reference in self.forks if reference() is not None]
            self.sweep_at = max(_MIN_SWEPT, 2 * len(self.forks))
        self.forks.append(weakref.ref(child))
