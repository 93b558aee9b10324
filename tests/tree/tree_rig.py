"""A KV tree, sequences and scheduled works without a model: KV is what the plan says."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from collections.abc import Sequence as SequenceABC
from typing import Any

import numpy as np

from cotrt.tree.attention.planner import AttentionPlanner, PlanCosts
from cotrt.tree.kv_tree import KVTree
from cotrt.tree.schedule.scheduler import Scheduler
from cotrt.tree.schedule.step import Step
from cotrt.tree.schedule.work import Work
from cotrt.tree.sequence import Sequence
from cotrt.tree.tiers.record_keys import next_key
from cotrt.tree.tokens import TokenSpan

COSTS = PlanCosts(kv_bytes_per_token=64, partial_bytes_per_row=64)


class Grove:
    """Sequences over a tree; `compute` stands for a step that the model has run."""

    def __init__(self, num_blocks: int = 64, block_size: int = 4) -> None:
        self.tree = KVTree(num_blocks, block_size)
        self.sequences: list[Sequence] = []
        self._ids = itertools.count()

    def root(self, ids: SequenceABC[int] = ()) -> Sequence:
        span = TokenSpan()
        span.extend(list(ids))
        number = next(self._ids)
        seq = Sequence(number, span, self.tree.root, seed=number, number=number)
        self.tree.attach(seq)
        self.sequences.append(seq)
        return seq

    def fork(self, seq: Sequence, length: int | None = None) -> Sequence:
        length = seq.length if length is None else length
        number = next(self._ids)
        child = Sequence(
            number, seq.span.child(length), seq.node, seed=number, parent=seq, number=number
        )
        self.tree.fork_tip(seq, child)
        self.tree.truncate_tip(child, length)
        seq.adopt_child(child)
        self.sequences.append(child)
        return child

    def compute(self, seq: Sequence, ids: SequenceABC[int] = ()) -> tuple[int, int] | None:
        """Append `ids` and compute all that is not; the copy that was needed, or None."""
        seq.span.extend(list(ids))
        num_new = seq.length - seq.num_computed
        if not num_new:
            return None
        copy = self.tree.reserve(seq, num_new)
        self.tree.commit(seq, num_new)
        self.tree.trim(seq)
        self.check()
        return copy

    def drop(self, seq: Sequence, *, pruned: bool = False) -> None:
        self.tree.detach(seq, pruned=pruned)
        self.sequences.remove(seq)
        self.check()

    def check(self) -> None:
        self.tree.check_invariants(self.sequences)

    @property
    def counts(self) -> tuple[int, int, int]:
        """Blocks free, in use, cached."""
        pool = self.tree.pool
        return pool.num_free, pool.num_in_use, pool.num_cached


class Desk:
    """A scheduler and works on its sequences, with no model: `run` only commits."""

    def __init__(self, num_blocks: int = 64, block_size: int = 4, **options: Any) -> None:
        self.tree = KVTree(num_blocks, block_size)
        options = {
            "max_num_seqs": 256,
            "max_num_batched_tokens": 2048,
            "max_scored_rows": 1024,
            **options,
        }
        self.scheduler = Scheduler(self.tree, AttentionPlanner(block_size, COSTS), **options)
        self._ids, self._numbers = itertools.count(), itertools.count()

    def root(self, ids: SequenceABC[int]) -> Sequence:
        span = TokenSpan()
        span.extend(list(ids))
        number = next(self._ids)
        seq = Sequence(number, span, self.tree.root, seed=number, number=number)
        self.tree.attach(seq)
        self.scheduler.add_sequence(seq)
        return seq

    def fork(self, seq: Sequence) -> Sequence:
        number = next(self._ids)
        child = Sequence(
            number, seq.span.child(seq.length), seq.node, seed=number, parent=seq, number=number
        )
        self.tree.fork_tip(seq, child)
        self.scheduler.add_sequence(child)
        seq.adopt_child(child)
        return child

    def generate(self, seq: Sequence, *, priority: int = 0, scores_from: int | None = None) -> Work:
        """A work that samples after the sequence's last token."""
        return self._work(
            seq, True, Work.NO_SCORES if scores_from is None else scores_from, priority
        )

    def score(self, seq: Sequence, first: int, *, priority: int = 0) -> Work:
        """A work that scores the tokens from position `first` on."""
        return self._work(seq, False, first - 1, priority)

    def _work(self, seq: Sequence, samples: bool, logits_from: int, priority: int) -> Work:
        work = Work(
            seq,
            samples=samples,
            logits_from=logits_from,
            priority=priority,
            number=next(self._numbers),
            data=None,
        )
        seq.work = work
        self.scheduler.add(work)
        return work

    def schedule(self) -> Step | None:
        return self.scheduler.schedule()

    def run(self, tokens: Any = None) -> Step | None:
        """One step: scheduled, taken for computed, and each draw given a token.

        Args:
            tokens: called with each drawing work; the token that it draws, or None to end it.
                Default: every draw ends its work.
        """
        step = self.scheduler.schedule()
        if step is None:
            return None
        self.scheduler.commit(step)
        drawn, goes_on = [], True
        for work in step.draws:
            token = None if tokens is None else tokens(work)
            if token is None:
                self.end(work)
                goes_on = False
            else:
                drawn.append(token)
                work.seq.span.ids.append(token)
                work.seq.span.logprobs.append(-1.0)
                work.seq.span.sampled.append(1)
        for work in {work for work, _ in step.scored}:
            if work.is_satisfied:
                self.end(work)
        if goes_on and step.is_decode:
            self.scheduler.decode.goes_on(step, np.array(drawn, np.int32))
        self.check()
        return step

    def end(self, work: Work) -> None:
        self.scheduler.remove(work)
        work.seq.work = None

    def check(self) -> None:
        self.tree.check_invariants(list(self.scheduler.sequences))


def path_keys(key: bytes, ids: SequenceABC[int], block_size: int) -> Iterator[bytes]:
    """Keys of the whole blocks of `ids` that follow the block of `key`."""
    for start in range(0, len(ids) - block_size + 1, block_size):
        key = next_key(key, ids[start : start + block_size])
        yield key
