"""The sequences of an engine: made, forked, rolled back, pruned and closed, without the model."""

from __future__ import annotations

import collections
import itertools
from typing import TYPE_CHECKING, Any

from cotrt.engine.handle_ref import HandleRef
from cotrt.engine.outcomes import Outcomes
from cotrt.engine.state import Tail
from cotrt.errors import BranchPrunedError
from cotrt.sampling.seeds import child_seed, root_seed
from cotrt.tree.kv_tree import KVTree
from cotrt.tree.leases import give_lease
from cotrt.tree.schedule.scheduler import Scheduler
from cotrt.tree.sequence import Sequence
from cotrt.tree.tokens import TokenSpan

if TYPE_CHECKING:
    from cotrt.tree.node import Node


class SequenceTable:
    """Verbs on sequences that take effect at once. The caller holds the engine's lock.

    Args:
        tree: the KV tree; scheduler: who has the sequences that hold KV or may.
        outcomes: ends the works of what is pruned.
        seed: what the seeds of roots are hashed from.

    Attributes:
        num_forks, num_prunes: how many there were.
    """

    def __init__(self, tree: KVTree, scheduler: Scheduler, outcomes: Outcomes, seed: int) -> None:
        self.num_forks = 0
        self.num_prunes = 0
        self._tree = tree
        self._scheduler = scheduler
        self._outcomes = outcomes
        self._seed = seed
        self._ids = itertools.count()
        self._num_roots = 0
        self._dropped: collections.deque[HandleRef] = collections.deque()

    def new_root(self, ids: list[int]) -> Sequence:
        """A root sequence of given tokens."""
        span = TokenSpan()
        span.extend(ids)
        number = self._num_roots
        self._num_roots += 1
        seq = Sequence(
            next(self._ids),
            span,
            self._tree.root,
            seed=root_seed(self._seed, number),
            number=number,
        )
        self._register(seq)
        return seq

    def fork(self, seq: Sequence, length: int | None = None, *, internal: bool = False) -> Sequence:
        """A child that shares tokens and KV of `seq` up to `length` (default: all)."""
        length = seq.length if length is None else length
        number = seq.num_forks
        if not internal:
            seq.num_forks += 1
            self.num_forks += 1
        child = Sequence(
            next(self._ids),
            seq.span.child(length),
            seq.node,
            seed=child_seed(seq.seed, number),
            parent=seq,
            number=number,
            internal=internal,
        )
        child.fork_length = length
        child.num_restorable = min(seq.num_restorable, length)
        if seq.grammar is not None and seq.grammar[1] <= length:
            child.grammar = seq.grammar
        if seq in self._scheduler.sequences:
            self._tree.fork_tip(seq, child)
            self._tree.truncate_tip(child, length)
        else:  # a closed parent that lives on for its descendants holds no KV
            child.node = child.root
            self._tree.attach(child)
        self._scheduler.add_sequence(child)
        seq.adopt_child(child)
        return child

    def new_saved(
        self, seed: int, number: int, length: int, parent: Sequence | None, root: Node | None = None
    ) -> Sequence:
        """A sequence of a saved branch, without KV: a root, or a child of `parent`.

        Args:
            seed: its own; number: its fork number; length: tokens that it has of its parent's.
            root: of the tree, below which its KV lies; None: that of all.
        """
        if parent is None:
            number = self._num_roots
            self._num_roots += 1
        seq = Sequence(
            next(self._ids),
            TokenSpan() if parent is None else parent.span.child(length),
            root or (self._tree.root if parent is None else parent.root),
            seed=seed,
            parent=parent,
            number=number,
        )
        self._register(seq)
        if parent is not None:
            parent.adopt_child(seq)
        return seq

    def extend(self, seq: Sequence, ids: list[int]) -> None:
        """Append given tokens; they are computed with the next work that needs them."""
        seq.span.extend(ids)

    def truncate(self, seq: Sequence, length: int, *, same_draws: bool) -> None:
        """Roll back to `length` tokens; the next sampling draws anew unless `same_draws`."""
        if length == seq.length:
            return
        self._tree.truncate_tip(seq, length)
        seq.span = seq.span.truncated(length)
        seq.num_restorable = min(seq.num_restorable, length)
        if seq.grammar is not None and seq.grammar[1] > length:
            seq.grammar = None
        if not same_draws:
            seq.epoch += 1

    def cut(self, seq: Sequence, length: int) -> Tail:
        """`truncate` that gives what it removed, for `restore`."""
        end = seq.length
        tail = Tail(
            seq.ids(length, end),
            seq.span.slice_logprobs(length, end),
            seq.span.slice_sampled(length, end),
        )
        self.truncate(seq, length, same_draws=False)
        return tail

    def restore(self, seq: Sequence, tail: Tail) -> None:
        """Append what `cut` removed; its KV is found again or computed again."""
        seq.span.ids += tail.ids
        seq.span.logprobs += tail.logprobs
        seq.span.sampled += tail.sampled

    def prune(self, seq: Sequence) -> None:
        """Cut `seq` and everything grown from it: running work stops, KV is given up."""
        if seq.pruned:
            return
        self.num_prunes += 1
        stack, doomed = [seq], []
        while stack:
            each = stack.pop()
            doomed.append(each)
            stack.extend(each.living_children(internal=True))
        for each in doomed:
            each.pruned = True
        # Leaves first, so that a block's last holder is the one nearest to the root.
        for each in reversed(doomed):
            if each.work is not None:
                self._outcomes.end_pruned(each.work)
            if each.choice is not None:
                self._outcomes.end_choice(each.choice, BranchPrunedError("the branch was pruned"))
            if each in self._scheduler.sequences:
                self._scheduler.drop_sequence(each, pruned=True)
        self._outcomes.wake()

    def close(self, seq: Sequence) -> None:
        """Give up the handle: without running work its KV is only cached from now on."""
        self._outcomes.close(seq)

    def reopen(self, seq: Sequence) -> None:
        """A handle was made again for a closed sequence that lives on in its descendants."""
        seq.closed = False
        self._register(seq)

    def watch(self, handle: Any, seq: Sequence) -> None:
        """Take `handle` for the handle of `seq`, which counts as closed once nobody has it."""
        seq.handle = HandleRef(handle, self._dropped.append, seq)

    def is_alive(self, seq: Sequence) -> bool:
        """Not pruned, and with a handle, running work or a living descendant."""
        stack = [seq]
        while stack:
            each = stack.pop()
            if not each.pruned and (not each.closed or each.is_busy):
                return True
            stack.extend(each.living_children())
        return False

    @property
    def has_dropped(self) -> bool:
        """Handles were dropped since the last `close_dropped`."""
        return bool(self._dropped)

    def keep(self, seq: Sequence, until: float) -> None:
        """A lease on `seq`'s KV, if all leases together stay within their share of the pool."""
        give_lease(self._tree, self._scheduler.sequences, seq, until)

    def close_dropped(self) -> None:
        """Close the sequences whose handles were dropped."""
        while self._dropped:
            handle = self._dropped.popleft()
            seq = handle.seq
            if seq.handle is handle:  # no other was made since
                seq.handle = None
                if not seq.closed:
                    self.close(seq)

    def _register(self, seq: Sequence) -> None:
        if seq not in self._scheduler.sequences:
            self._tree.attach(seq)
            self._scheduler.add_sequence(seq)
