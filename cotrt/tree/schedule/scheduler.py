"""The scheduler: one progress rule, one token budget, one owner for a prefix in computation.

There is no prefill phase and no decode phase: in every sequence `num_computed` chases the tokens
it has, and a step hands out a budget of tokens, first to running works, then to waiting ones.

A waiting work whose next tokens are just being computed by a running one (its *leader*) follows:
it is not scheduled until the leader has computed them, and takes logits from the leader's rows
where both want them at the same path. If the leader ends early, the first follower takes over,
simply because it finds no leader any more.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Collection

from cotrt.tree.attention.planner import AttentionPlanner
from cotrt.tree.kv_tree import KVTree
from cotrt.tree.schedule.commits import commit_any, commit_decode
from cotrt.tree.schedule.counters import Counters
from cotrt.tree.schedule.decode_steps import DecodeSteps
from cotrt.tree.schedule.leaders import find_leader, is_ahead
from cotrt.tree.schedule.memory_pressure import choose_victim, give_up, reclaim_idle
from cotrt.tree.schedule.step import Step
from cotrt.tree.schedule.step_builder import StepBuilder
from cotrt.tree.schedule.step_limit import StepLimit
from cotrt.tree.schedule.work import Work, WorkState
from cotrt.tree.sequence import Sequence


class Scheduler:
    """Chooses what each step computes, and commits what it brought.

    Args:
        tree: the KV tree; planner: the attention planner of the backend.
        max_num_seqs: works that run at a time.
        max_num_batched_tokens: rows a step, at most; see `limit`.
        max_scored_rows: scored logits rows a step (each is ``vocab_size`` wide).
        match_prompts: look for a new root's tokens in the tree; forks share in any case.

    Attributes:
        limit: rows that the next step may have.
        decode: steps that only lengthen the last.
        only: the one work that the next steps are of, or None for all; all again once it is done.
    """

    def __init__(
        self,
        tree: KVTree,
        planner: AttentionPlanner,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_scored_rows: int,
        match_prompts: bool = True,
    ) -> None:
        self.tree = tree
        self.counters = Counters()
        self.sequences: dict[Sequence, None] = {}
        self.waiting: list[Work] = []
        self.running: list[Work] = []
        self.decode = DecodeSteps(tree, planner)
        self._planner = planner
        self._max_num_seqs = max_num_seqs
        self.limit = StepLimit(max_num_batched_tokens)
        self._max_scored_rows = max_scored_rows
        self._match_prompts = match_prompts
        self._serial = itertools.count(1)
        self._exhausted: list[Work] = []
        self.only: Work | None = None
        self.waits_for_records = False  # a work of the last schedule needs a record that is read

    # ---- sequences and works ------------------------------------------------------------------

    def add_sequence(self, seq: Sequence) -> None:
        self.sequences[seq] = None

    def drop_sequence(self, seq: Sequence, *, pruned: bool = False) -> None:
        """Release its KV and forget it. Its work has been removed before."""
        self.tree.detach(seq, pruned=pruned)
        del self.sequences[seq]

    def add(self, work: Work) -> None:
        bisect.insort(self.waiting, work, key=lambda w: w.rank)
        self.disturb()

    def remove(self, work: Work) -> None:
        """The work is done (or cancelled): a step in flight drops what it brings for it."""
        if work.state is WorkState.DONE:
            return
        (self.running if work.state is WorkState.RUNNING else self.waiting).remove(work)
        work.state = WorkState.DONE
        work.leader = None
        self.tree.trim(work.seq)
        self.disturb()
        if not self.running:
            self.decode.forget()  # an idle engine keeps nothing of what it ran last

    def disturb(self) -> None:
        """Something changed under the running works: the next step is scheduled afresh."""
        self.tree.version += 1

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting) or self._has_stores

    @property
    def _has_stores(self) -> bool:
        return self.tree.tiers is not None and self.tree.tiers.has_stores

    def take_exhausted(self) -> list[Work]:
        """Works that alone outgrew the pool, to be ended by the engine."""
        taken, self._exhausted = self._exhausted, []
        return taken

    # ---- schedule -----------------------------------------------------------------------------

    def schedule(self) -> Step | None:
        """The next step, or None if nothing can run."""
        self.waits_for_records = False
        step = self.decode.next()
        if step is not None:
            return step
        builder = StepBuilder(self.tree, self.limit.tokens, self._max_scored_rows)
        preemptions = self.counters.preemptions
        if self.only is not None and self.only.state is WorkState.DONE:
            self.only = None
        running = [work for work in self.running if self.only in (None, work)]
        for index, work in enumerate(running):
            if work.state is WorkState.RUNNING:
                self._schedule_running(builder, work, len(running) - index - 1)
        if self.counters.preemptions == preemptions or not (builder.entries or builder.loads):
            self._admit(builder)
        if not (builder.entries or builder.loads or self._has_stores):
            return None
        step = builder.build(self._planner, next(self._serial))
        step.is_decode = (
            step.is_decode
            and len(step.entries) == len(self.running)
            and (not self.waiting or len(self.running) >= self._max_num_seqs)
        )
        self.decode.note_scheduled()
        return step

    def _schedule_running(self, builder: StepBuilder, work: Work, num_behind: int) -> None:
        """Rows for a running work, with a row left for each of the `num_behind` after it.

        A long prompt takes at most half of a step's budget while others wait to begin, so that
        a short request does not wait for the end of a long one.
        """
        if work.load is not None and self._load_running(builder, work):
            return
        limit = builder.tokens_left - num_behind
        if any(waiting.leader is None for waiting in self.waiting):
            limit = min(limit, self.limit.tokens // 2)
        limit = max(limit, 1)
        rows = builder.rows_for(work, limit)
        if rows == 0:  # no budget left in this step
            return

        def fits() -> bool:
            return self.tree.can_allocate(builder.blocks_for(work, rows))

        if not fits() and self.tree.drop_view(work.seq):
            rows = builder.rows_for(work, limit)
        while not fits() and not reclaim_idle(self.tree, self.sequences, fits):
            victim = choose_victim(self.tree, self.running, work)
            if victim is not None:
                self._preempt(victim)
            elif len(self.running) > 1 or builder.entries or builder.loads:
                self._preempt(work)
                return
            elif not self.tree.drop_view(work.seq):
                self._exhausted.append(work)
                return
            else:
                rows = builder.rows_for(work, limit)
        builder.add(work, rows)

    def _load_running(self, builder: StepBuilder, work: Work) -> bool:
        """Records for a running work; False where it has to compute instead."""
        count = self._num_ready(builder, work)
        if count == 0:
            return work.load is not None

        def fits() -> bool:
            return self.tree.can_allocate(1)

        while not fits() and not reclaim_idle(self.tree, self.sequences, fits):
            victim = choose_victim(self.tree, self.running, work)
            if victim is None:
                work.load = None  # what it holds is all there is; computing decides what then
                return False
            self._preempt(victim)
        builder.add_load(work, min(count, self.tree.num_available))
        return True

    def _num_ready(self, builder: StepBuilder, work: Work) -> int:
        """Records that a work can take in now; gives its load up where reading takes too long."""
        tiers, load = self.tree.tiers, work.load
        assert tiers is not None and load is not None
        if builder.load_bytes_left <= 0:
            return 0
        count = tiers.num_ready(load, builder.load_bytes_left)
        if count == 0:
            if tiers.is_overdue(load):
                work.load = None
            else:
                self.waits_for_records = True
        return count

    def _preempt(self, work: Work) -> None:
        self.counters.preemptions += 1
        work.num_preempted += 1
        self.running.remove(work)
        work.state = WorkState.WAITING
        work.leader = work.load = None
        work.num_searched = -1
        give_up(self.tree, work.seq)
        bisect.insort(self.waiting, work, key=lambda w: w.rank)

    def _admit(self, builder: StepBuilder) -> None:
        started: list[Work] = []
        for work in self.waiting:
            if self.only not in (None, work):
                continue
            if len(self.running) + len(started) >= self._max_num_seqs:
                break
            leader = work.leader
            if leader is not None and is_ahead(leader, work):
                entry = builder.by_work.get(leader)
                if entry is not None and builder.take_logits(work, entry):
                    self._start(work, started)
                continue
            work.leader = None
            seq = work.seq
            if seq.num_computed > work.match_limit:
                self.tree.truncate_tip(seq, work.match_limit)
            if self._match_prompts or leader is not None:
                self.tree.advance(seq, work.match_limit)
            elif seq.num_restorable:
                self.tree.advance(seq, min(work.match_limit, seq.num_restorable))
            entry = find_leader(builder, work, any_root=self._match_prompts)
            if entry is not None:
                self._count_reused(work, max(work.wait_until, seq.num_computed))
                if builder.take_logits(work, entry):
                    self._start(work, started)
                    continue
                if work.wait_until > seq.num_computed:
                    work.leader = entry.work
                    continue
            if self.tree.tiers is not None and self._find_load(work):
                count = self._records_with_room(builder, work, bool(started))
                if count is None:
                    break
                if work.load is not None:
                    if count:
                        self._count_reused(work, max(work.load.end, seq.num_computed))
                        builder.add_load(work, count)
                        self._start(work, started, loads=True)
                    continue
            rows = self._rows_with_room(builder, work, bool(started))
            if rows == 0:
                break
            self._count_reused(work, seq.num_computed)
            builder.add(work, rows)
            self._start(work, started)
        for work in started:
            self.waiting.remove(work)
            bisect.insort(self.running, work, key=lambda w: w.rank)
        builder.started = started

    def _find_load(self, work: Work) -> bool:
        """Whether a tier has records of a waiting work's next tokens."""
        seq, tiers = work.seq, self.tree.tiers
        assert tiers is not None
        load = work.load
        if load is not None and load.start != seq.node.end:  # others have brought some, or it
            work.load, work.num_searched = None, -1  # had to give up what it had
        if work.load is None and work.num_searched != seq.num_computed:
            limit = work.match_limit
            if not self._match_prompts:
                limit = min(limit, seq.num_restorable)
            work.load = tiers.find(seq, limit)
            work.num_searched = seq.num_computed
        return work.load is not None

    def _records_with_room(self, builder: StepBuilder, work: Work, others: bool) -> int | None:
        """Records that a waiting work can start with; None if it has to wait for room.

        0 where they have to be read first, or with ``work.load`` gone: it has to compute.
        """
        count = self._num_ready(builder, work)
        if count == 0:
            return 0

        def fits() -> bool:
            return self.tree.can_allocate(count + len(self.running))

        idle = [seq for seq in self.sequences if seq is not work.seq]
        if fits() or reclaim_idle(self.tree, idle, fits):
            return count
        if others or self.running:
            return None
        count = min(count, self.tree.num_available)
        if count == 0:
            work.load = None
        return count

    def _start(self, work: Work, started: list[Work], *, loads: bool = False) -> None:
        work.state = WorkState.RUNNING  # at once: from here on its KV is not for others to take
        work.leader = None
        if not loads:  # it may have waited for records, and gets all from another's rows now
            work.load = None
        started.append(work)

    def _rows_with_room(self, builder: StepBuilder, work: Work, others: bool) -> int:
        """Rows that a waiting work can start with; 0 if it has to wait.

        There has to be room for them, and for a block more of each work that runs already.
        """
        rows = builder.rows_for(work)
        if rows == 0:
            return 0

        def fits() -> bool:
            needed = builder.blocks_for(work, rows) + len(self.running)
            return self.tree.can_allocate(needed)

        if not fits() and self.tree.drop_view(work.seq):
            rows = builder.rows_for(work)
        if fits():
            return rows
        idle = [seq for seq in self.sequences if seq is not work.seq]
        if reclaim_idle(self.tree, idle, fits):
            return rows
        if others or self.running:
            return 0
        if self.tree.drop_view(work.seq):  # it became one just now
            rows = builder.rows_for(work)
            if fits():
                return rows
        self._exhausted.append(work)
        return 0

    def _count_reused(self, work: Work, num_tokens: int) -> None:
        if work.num_reused is None:
            work.num_reused = num_tokens
            if work.counts_reuse:
                self.counters.prompt_tokens_reused += num_tokens

    # ---- update -------------------------------------------------------------------------------

    def commit(self, step: Step, failed: Collection[bytes] = ()) -> None:
        """The model has run `step`: what it computed and loaded becomes visible to everybody.

        Args:
            failed: keys of records that could not be read.
        """
        if step.plan.stores:
            self.forget_stores(step)
        if step.dropped is not None and step.dropped.all():
            return  # without running ahead it would not have been
        self.limit.note_success()
        self.counters.note(step)
        if step.is_decode:
            commit_decode(self.tree, step)
        else:
            commit_any(self.tree, step, failed)

    def undo(self, step: Step) -> None:
        """The model did not run `step`: its works are as they were before it was scheduled.

        What was evicted or preempted to make room for it stays so. A tail that was to be copied is
        dropped, for the copy may not have been made.
        """
        self.decode.forget()
        self.disturb()
        for work, logits_from in step.wanted:
            work.logits_from = logits_from
        self.forget_stores(step)
        works = [entry.work for entry in step.entries] + [load.work for load in step.loads]
        for work in works:
            if work.state is WorkState.RUNNING:
                self.tree.trim(work.seq)
        unsure = {destination for _, destination in step.plan.copies}
        for seq in self.sequences if unsure else ():
            if seq.private and seq.private[0] in unsure:
                self.tree.truncate_tip(seq, seq.node.end)
        for work in step.started:
            if work.state is WorkState.RUNNING:
                self.running.remove(work)
                work.state = WorkState.WAITING
                bisect.insort(self.waiting, work, key=lambda w: w.rank)

    def forget_stores(self, step: Step) -> None:
        """The stores of `step` were carried out, or it failed."""
        if self.tree.tiers is not None:
            self.tree.tiers.stored(step.plan.stores)
