"""The engine: sequences, works and the step. No threads of its own, one lock for everybody.

A step is schedule (under the lock), run (without it), update (under it). Verbs that need no model
take the lock between and act at once; what a step in flight brings for a work that ended in the
meantime is dropped.

Where the model is asynchronous, the next step is scheduled and launched while one is in flight, if
it only lengthens that one (docs/pipeline.md).
"""

from __future__ import annotations

import itertools
import logging
import time
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Any

import numpy as np

from cotrt.engine.kept_errors import let_go
from cotrt.engine.lock import EngineLock
from cotrt.engine.memory_shortage import MemoryShortage, give_back_memory, is_out_of_memory
from cotrt.engine.model import StepModel, is_asynchronous, kv_name
from cotrt.engine.model_runner import ModelRunner, Pending, StepResult
from cotrt.engine.outcomes import Outcomes
from cotrt.engine.promise import Promise
from cotrt.engine.ranking import RankState
from cotrt.engine.records.record_stores import RecordSource, RecordStores, TierOptions
from cotrt.engine.sequence_table import SequenceTable
from cotrt.engine.state import ChoiceState, GenerationState, ScoreState
from cotrt.errors import EngineDeadError
from cotrt.tree.attention.planner import CHUNK_TOKENS, AttentionPlanner, PlanCosts
from cotrt.tree.kv_tree import KVTree
from cotrt.tree.schedule.scheduler import Scheduler
from cotrt.tree.schedule.step import Step
from cotrt.tree.schedule.work import Work, WorkState
from cotrt.tree.sequence import Sequence
from cotrt.tree.tiers.record_keys import root_key
from cotrt.tree.tiers.tier_costs import TierCosts
from cotrt.tree.tiers.tiers import TierCounters, Tiers

logger = logging.getLogger(__name__)

# Scored logits a step hold at most this many numbers (64 MiB of float32).
_MAX_SCORED_NUMBERS = 1 << 24
# With nothing to do but wait for a record, it is looked again after this time at the latest.
_RECORD_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that was launched and whose result was not read yet."""

    step: Step
    pending: Pending


class Engine:
    """Everything that a program's tree of branches is made of.

    Args:
        model: the model; its KV cache is allocated here.
        num_blocks, block_size: the KV pool.
        max_num_seqs, max_num_batched_tokens: limits of a step.
        seed: what the seeds of roots are hashed from.
        match_prompts: reuse KV of earlier prompts for new ones.
        processed_logprobs: report log-probabilities of the distribution drawn from.
        deterministic: attention plans of fixed chunks; the model does its own part.
        check_laws: recompute every law when a step has left nothing to do, and find out which
            part of the model gives NaN: a debug mode, which runs no step ahead.
        tiers: where KV goes that leaves the pool; None: nowhere, it is computed again.

    Attributes:
        lock: held by whoever reads or changes the tree.
        on_work: called (with the lock held) when there is something to do.
        dead: why nothing works any more, or None.
        records: where KV lies that has left the pool, or None.
        table: the sequences, and the verbs that need no model.

    Raises:
        OSError: the folder of a disk tier cannot be made or read.
    """

    def __init__(
        self,
        model: StepModel,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        seed: int = 0,
        match_prompts: bool = True,
        processed_logprobs: bool = False,
        deterministic: bool = False,
        check_laws: bool = False,
        tiers: TierOptions | None = None,
    ) -> None:
        self.model = model
        self.lock = EngineLock()
        self.tree = KVTree(num_blocks, block_size)
        planner = AttentionPlanner(
            block_size,
            PlanCosts(**model.plan_options),
            chunk_tokens=CHUNK_TOKENS if deterministic else 0,
        )
        self.scheduler = Scheduler(
            self.tree,
            planner,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_scored_rows=max(16, _MAX_SCORED_NUMBERS // model.vocab_size),
            match_prompts=match_prompts,
        )
        model.allocate_kv(num_blocks, block_size)
        self.on_work: Callable[[], None] = lambda: None
        self.dead: BaseException | None = None
        self._outcomes = Outcomes(self.tree, self.scheduler)
        self._shortage = MemoryShortage(self.scheduler, self._outcomes.fail_unless_done)
        self.table = SequenceTable(self.tree, self.scheduler, self._outcomes, seed)
        self._runner = ModelRunner(model, processed_logprobs=processed_logprobs, debug=check_laws)
        self.records: RecordStores | None = None
        if tiers is not None:
            self._make_tiers(tiers)
        self._check_laws = check_laws
        self._num_works = itertools.count()
        self._between: list[tuple[Callable[[], Any], Promise]] = []
        self._sources: list[tuple[weakref.ref[Sequence], RecordSource]] = []
        self._in_flight = False  # a step is scheduled and its update not done
        self._runs_ahead = is_asynchronous(model) and not check_laws
        self._flight: Flight | None = None  # left on the device when a call of step() returned

    # ---- tiers --------------------------------------------------------------------------------

    def _make_tiers(self, options: TierOptions) -> RecordStores:
        costs, size = TierCosts(always=options.always), self.tree.block_size
        self.records = RecordStores(self.model, block_size=size, options=options, costs=costs)
        if self.records.disk is not None:
            self.records.disk.on_room = lambda: self.on_work()
        self.tree.tiers = Tiers(
            self.records,
            costs,
            root_key(kv_name(self.model), size),
            size,
            self.model.kv_shape.token_bytes,
            keep_sealed=options.keep,
        )
        self._runner.records = self.records
        return self.records

    def add_source(self, source: RecordSource, owner: Sequence | None = None) -> None:
        """KV of `source` is loaded in place of being computed. The caller holds the lock.

        Args:
            owner: when it is gone, and all that was forked from it, so is the source.
        """
        records = self.records or self._make_tiers(TierOptions())
        records.add_source(source)
        if owner is not None:
            self._sources.append((weakref.ref(owner), source))

    # ---- works (the caller holds the lock) ----------------------------------------------------

    def start_generation(self, state: GenerationState) -> None:
        """Queue a generate. Its sequence is busy until it ends."""
        seq, params = state.seq, state.params
        state.created = time.monotonic()
        wants_prompt = params.prompt_logprobs is not None
        samples = state.max_length > seq.length
        work = self._new_work(
            seq,
            samples=samples,
            logits_from=0 if wants_prompt else Work.NO_SCORES,
            priority=params.priority,
            data=state,
        )
        state.work = work
        self._queue(work)
        if work.is_satisfied:
            self._outcomes.finish(work, "length", None)
            self._outcomes.wake()

    def start_score(
        self, state: ScoreState, priority: int = 0, *, counts_reuse: bool = True
    ) -> None:
        """Queue a score on its temporary sequence; one of a call's counts what they reuse."""
        work = self._new_work(
            state.seq, samples=False, logits_from=state.first - 1, priority=priority, data=state
        )
        work.counts_reuse = counts_reuse
        state.work = work
        self._queue(work)

    def start_ranking(self, state: RankState) -> None:
        """Queue a ranking of what may follow its sequence."""
        work = self._new_work(
            state.seq, samples=True, logits_from=Work.NO_SCORES, priority=0, data=state
        )
        state.work = work
        self._queue(work)

    def append_sampled(self, seq: Sequence, token: int, logprob: float) -> None:
        """Append a token that was chosen from a ranking; it counts as sampled."""
        seq.span.ids.append(token)
        seq.span.logprobs.append(logprob)
        seq.span.sampled.append(1)
        self._outcomes.num_generated += 1

    def discard(self, seq: Sequence) -> None:
        """Forget an internal sequence; its KV is only cached from now on."""
        self._outcomes.drop_temporary(seq)

    def start_choice(self, state: ChoiceState) -> None:
        """Queue the scores of a choose; its sequence is busy until all have ended."""
        state.seq.choice = state
        for score in state.scores:
            score.choice = state
            self.start_score(score, counts_reuse=score is state.scores[0])

    def cancel_choice(self, state: ChoiceState) -> None:
        """End a choose now; its branch is free and unchanged."""
        self._outcomes.end_choice(state, CancelledError("the choice was cancelled"))
        self._outcomes.wake()

    def _new_work(self, seq: Sequence, **options: Any) -> Work:
        work = Work(seq, number=next(self._num_works), **options)
        seq.work = work
        return work

    def _queue(self, work: Work) -> None:
        self.scheduler.add(work)
        if self.records is not None:
            self.records.ring()
        self.on_work()

    def cancel(self, state: GenerationState | ScoreState | RankState) -> None:
        """End a work now; the branch is free when this returns, with the tokens that it has."""
        work = state.work
        if work is None or work.state is WorkState.DONE or state.promise.done:
            return
        if isinstance(state, GenerationState):
            self._outcomes.finish(work, "abort", None)
        else:
            self._outcomes.fail(work, CancelledError("the handle was cancelled"))
        self._outcomes.wake()

    def when_between_steps(self, call: Callable[[], Any]) -> Promise:
        """Run `call` under the lock with no step in flight: now, or after the present one."""
        promise = Promise()
        if self._in_flight:
            self._between.append((call, promise))
        else:
            self._drop_closed()
            promise.set(call())
        return promise

    # ---- the step -----------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self.table.has_dropped or self._flight is not None

    def step(self) -> bool:
        """Run one step; with an asynchronous model, launch one and see to the one before it.

        Returns:
            False if there was nothing to do.
        """
        waits = False
        self.lock.acquire_after_others()
        try:
            if self.dead is not None:
                return False
            self._drop_closed()
            flight = self._flight
            step = self._schedule() if flight is None else self._schedule_ahead(flight)
            if step is None and flight is None:
                self._outcomes.wake()
                if self._check_laws and not self.scheduler.has_work:
                    self.check_invariants()
                waits = self.scheduler.waits_for_records
                return self.scheduler.has_work
            if step is not None:
                batch = self._runner.prepare(step)
                num_top = [self._num_top(work) for work, _ in step.scored]
                self._in_flight = True
        except BaseException as error:
            self._die(error)
            raise
        finally:
            self.lock.release()
            if waits and self.records is not None:
                self.records.wait(_RECORD_SECONDS)
        self._flight = None
        if step is not None:
            before = None if flight is None else flight.pending
            self._flight = Flight(step, self._runner.launch(step, batch, num_top, before))
            if flight is None:
                if not self._flight.pending.is_done:
                    return True
                flight, self._flight = self._flight, None
        assert flight is not None
        landing = flight
        step = flight = batch = before = None  # an error's traceback keeps this frame
        self._land(landing, self._flight)
        del landing
        return True

    def _schedule(self) -> Step | None:
        step = self.scheduler.schedule()
        if step is None and self._shortage.is_trying and not self.scheduler.waits_for_records:
            self._shortage.nothing_to_try()
            step = self.scheduler.schedule()
        for work in self.scheduler.take_exhausted():
            self._outcomes.finish_exhausted(work)
        if step is not None:
            if not step.is_decode:
                self._note_scheduled(step)
            elif self._runs_ahead and step.num_ahead < 0:
                step.num_ahead = self._num_ahead(step)
        return step

    def _schedule_ahead(self, flight: Flight) -> Step | None:
        """The step after the one in flight, if it need not wait for that one's result."""
        if flight.pending.token_ids is None or self._between:
            return None
        return self.scheduler.decode.ahead(flight.step)

    def _num_ahead(self, step: Step) -> int:
        """How many steps may be in flight behind `step` before one of its works is sure to end."""
        states = [work.data for work in step.draws]
        if any(type(state) is not GenerationState for state in states):
            return 0
        return min(int(state.max_length - state.seq.length) for state in states) - 1

    def _land(self, flight: Flight, behind: Flight | None) -> None:
        """Wait for a step and take what it brought; `behind` was launched with its draws."""
        try:
            result = flight.pending.result()
        except Exception as error:
            self._flight = None
            if behind is not None:
                _wait_in_vain(behind)
                with self.lock:
                    self.scheduler.forget_stores(behind.step)
            self._after_failed_step(flight.step, error)
            # Whoever keeps the error, a log say, does not keep the step and its sequences.
            let_go(error)
            del flight, behind
            return
        with self.lock:
            self._in_flight = behind is not None
            try:
                self._update(flight.step, result, None if behind is None else behind.step)
            except BaseException as error:
                self._die(error)
                raise
            if behind is None:
                self._answer_between()
            self._outcomes.wake()

    def settle(self) -> None:
        """Wait until nothing runs on the device, and drop what it brings; the engine is dead."""
        flight, self._flight = self._flight, None
        if flight is not None:
            _wait_in_vain(flight)

    def _note_scheduled(self, step: Step) -> None:
        now = time.monotonic()
        works = [load.work for load in step.loads]
        works += [entry.work for entry in step.entries]
        for work in itertools.chain(works, step.joined):
            state = work.data
            if isinstance(state, GenerationState) and not state.first_scheduled:
                state.first_scheduled = now

    def _num_top(self, work: Work) -> int:
        state = work.data
        if isinstance(state, GenerationState) and state.params.prompt_logprobs is not None:
            return state.params.prompt_logprobs
        return -1

    def _update(self, step: Step, result: StepResult, behind: Step | None) -> None:
        drawn = result.drawn
        if drawn is not None and drawn.bad.any():
            for index in np.flatnonzero(drawn.bad).tolist():
                row = int(step.plan.sample_rows[index])
                self._outcomes.end_bad(step.draws[index], result, row)
        for (work, _), row, scores in zip(step.scored, step.plan.scored_rows, result.scored):
            if scores is None:
                self._outcomes.end_bad(work, result, int(row))
        for error in result.row_errors.values():
            let_go(error)
        self.scheduler.commit(step, result.failed)
        if self._shortage.is_trying:
            self._shortage.step_went_well()
        if step.scored:
            self._outcomes.take_scores(step, result)
        if result.ranked:
            self._outcomes.finish_rankings(step, result.ranked)
        if drawn is not None:
            goes_on = self._outcomes.append_drawn(step, drawn)
            if behind is not None:
                self.scheduler.decode.learn(behind, step, drawn.token_ids)
            elif goes_on and step.is_decode:
                self.scheduler.decode.goes_on(step, drawn.token_ids)

    # ---- in trouble ---------------------------------------------------------------------------

    def _drop_closed(self) -> None:
        self.table.close_dropped()
        if self._sources:
            self._drop_sources()

    def _drop_sources(self) -> None:
        """Give up the sources of sequences that are gone, and of which no descendant is left."""
        for each in [each for each in self._sources if each[0]() is None]:
            assert self.records is not None
            self._sources.remove(each)
            self.records.remove_source(each[1])

    def _after_failed_step(self, step: Step, error: Exception) -> None:
        short = is_out_of_memory(error)
        if short:
            give_back_memory(self.model, error)
        else:
            logger.error("a step failed; the requests in it end with its error", exc_info=error)
        with self.lock:
            self._in_flight = False
            self.scheduler.undo(step)
            if short:
                self._shortage.step_failed(step, error)
            else:
                for work in step.works():
                    self._outcomes.fail_unless_done(work, error)
            self._answer_between()
            self._outcomes.wake()

    def _die(self, error: BaseException) -> None:
        """A law was broken or a bug was met: every waiter gets EngineDeadError at once."""
        self.stop(f"the engine stopped: {type(error).__name__}: {error}", error)

    def stop(self, why: str, cause: BaseException | None = None, *, silently: bool = False) -> None:
        """End all works with EngineDeadError; the engine does nothing from now on.

        Args:
            silently: the program is ending. Let those who wait sleep on: they are daemon threads,
                and would only print tracebacks.
        """
        dead = EngineDeadError(why)
        dead.at_exit = silently
        dead.__cause__ = cause
        self.dead = dead
        self._in_flight = False
        for work in [*self.scheduler.running, *self.scheduler.waiting]:
            work.state = WorkState.DONE
            state = work.data
            for ended in (state, getattr(state, "choice", None)):
                if ended is not None:
                    ended.promise.fail(dead)
                    self._outcomes.woken.append(ended.promise)
        for _, promise in self._between:
            promise.fail(dead)
            self._outcomes.woken.append(promise)
        if silently:
            self._outcomes.woken.clear()
        self._outcomes.wake()

    def _answer_between(self) -> None:
        calls, self._between = self._between, []
        if calls:
            self._drop_closed()
        for call, promise in calls:
            promise.set(call())
            self._outcomes.woken.append(promise)

    # ---- looking inside -----------------------------------------------------------------------

    @property
    def num_generated(self) -> int:
        """Tokens that were sampled and kept."""
        return self._outcomes.num_generated

    @property
    def moved(self) -> TierCounters:
        """What the tiers did."""
        return TierCounters() if self.tree.tiers is None else self.tree.tiers.counters

    def check_invariants(self) -> None:
        """Recompute every law of the tree and the pool; AssertionError names a broken one."""
        self.tree.check_invariants(list(self.scheduler.sequences))
        if self.records is not None and self.tree.tiers is not None:
            self.tree.tiers.check_invariants(self.tree)
            self.records.check_invariants()


def _wait_in_vain(flight: Flight) -> None:
    try:
        flight.pending.result()
    except Exception:
        logger.debug("a step that nobody waits for failed", exc_info=True)
