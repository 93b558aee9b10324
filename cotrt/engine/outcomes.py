"""What steps bring to works: tokens, scores, and their ends, wanted or not."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any

from cotrt.engine.model_runner import StepResult
from cotrt.engine.promise import Promise, wake
from cotrt.engine.ranking import Ranking, RankState
from cotrt.engine.state import ChoiceState, GenerationState, ScoreState, TokenScores
from cotrt.errors import (
    BranchPrunedError,
    InvalidRequestError,
    KVCacheExhaustedError,
    NumericsError,
)
from cotrt.tree.kv_tree import KVTree
from cotrt.tree.schedule.scheduler import Scheduler
from cotrt.tree.schedule.step import Step
from cotrt.tree.schedule.work import Work, WorkState
from cotrt.tree.sequence import Sequence

logger = logging.getLogger(__name__)


class Outcomes:
    """Takes in what a step brought and ends works. The caller holds the engine's lock.

    Args:
        tree, scheduler: the engine's.

    Attributes:
        woken: promises that have changed and whose waiters are not woken yet.
        num_generated: tokens that were sampled and kept.
    """

    def __init__(self, tree: KVTree, scheduler: Scheduler) -> None:
        self._tree = tree
        self._scheduler = scheduler
        self.woken: list[Promise] = []
        self.num_generated = 0

    def append_drawn(self, step: Step, drawn: Any) -> bool:
        """Append each draw to its sequence and end what is complete; True if all go on."""
        tops, goes_on, now = drawn.top, True, 0.0
        tokens, logprobs = drawn.token_ids.tolist(), drawn.logprobs.tolist()
        for index, work in enumerate(step.draws):
            if work.state is not WorkState.RUNNING:
                goes_on = False
                continue
            state, span, token = work.data, work.seq.span, tokens[index]
            span.ids.append(token)
            span.logprobs.append(logprobs[index])
            span.sampled.append(1)
            self.num_generated += 1
            if tops and index in tops:
                state.scores.append(TokenScores(logprobs[index], tops[index]))
            if state.history is not None:
                state.history.append(token)
            if not state.first_token:
                now = now or time.monotonic()
                self._note_first_token(work, state, now)
            length = span.start + len(span.ids)
            if length > state.min_length and token in state.stop_ids:
                if token in state.eos_ids:
                    state.ended_by_eos, work.seq.ended_at = True, length
                reason = None if state.ended_by_eos else token
                if state.watch is not None:  # its text may be what a stop string says
                    is_fine, stop = self._watch(work, state.watch.append_end, token)
                    if not is_fine:
                        goes_on = False
                        continue
                    reason = reason if stop is None else stop
                self.finish(work, "stop", reason)
                goes_on = False
                continue
            if state.watch is not None:
                is_fine, stop = self._watch(work, state.watch.append, (token,))
                if stop is not None:
                    self.finish(work, "stop", stop)
                if stop is not None or not is_fine:
                    goes_on = False
                    continue
            if length >= state.max_length:
                self.finish(work, "length", None)
                goes_on = False
            elif state.promise.is_watched:
                self.woken.append(state.promise)
        return goes_on

    def _watch(
        self, work: Work, append: Callable[[Any], Any], value: Any
    ) -> tuple[bool, str | None]:
        """The stop string that `append` finds; False where its tokenizer raised: the work ended."""
        try:
            match = append(value)
        except Exception as error:
            logger.exception("the tokenizer failed; the request ends with its error")
            self.fail(work, error)
            return False, None
        return True, None if match is None else match.stop

    def _note_first_token(self, work: Work, state: GenerationState, now: float) -> None:
        state.first_token = now
        if work.num_reused is not None:
            state.num_cached = min(work.num_reused, state.start - 1)

    def take_scores(self, step: Step, result: StepResult) -> None:
        """Hand out the scored logits, and end what has all of its own."""
        for (work, position), scores in zip(step.scored, result.scored):
            if scores is None or work.state is WorkState.DONE:
                continue
            state = work.data
            if isinstance(state, ScoreState):
                state.logprobs.append(scores.logprob)
            else:
                state.prompt_scores[position + 1] = scores
        for work, _ in step.scored:
            if work.state is not WorkState.DONE and work.is_satisfied:
                if isinstance(work.data, ScoreState):
                    self._finish_score(work)
                else:
                    self.finish(work, "length", None)

    def finish(self, work: Work, reason: str, stop_reason: int | str | None) -> None:
        """End a generate as it should."""
        state: GenerationState = work.data
        seq = state.seq
        self._retire(work)
        state.finished = time.monotonic()
        if work.num_reused is not None:
            state.num_cached = max(0, min(work.num_reused, state.start - 1))
        self._collect(state)
        state.finish_reason, state.stop_reason = reason, stop_reason
        state.promise.set(None)
        self.woken.append(state.promise)
        if state.release_when_done or seq.closed:
            self.close(seq)

    def finish_exhausted(self, work: Work) -> None:
        """End a work that alone outgrew the pool."""
        if isinstance(work.data, GenerationState):
            self.finish(work, "length", "kv_capacity")
        else:
            pool = self._tree.pool
            error = KVCacheExhaustedError(
                f"scoring needs {work.seq.length} tokens of KV, the pool holds "
                f"{pool.num_blocks * pool.block_size}: raise kv_cache_memory_bytes"
            )
            self.fail(work, error)

    def finish_rankings(self, step: Step, ranked: list[Ranking]) -> None:
        """End the rankings of a step."""
        works = [work for work in step.draws if type(work.data) is RankState]
        for work, ranking in zip(works, ranked):
            if work.state is WorkState.RUNNING:
                self._retire(work)
                work.data.promise.set(ranking)
                self.woken.append(work.data.promise)

    def _finish_score(self, work: Work) -> None:
        state: ScoreState = work.data
        self._retire(work)
        state.promise.set(state.logprobs)
        self.woken.append(state.promise)
        if state.choice is None:
            self.drop_temporary(state.seq)
        elif all(score.promise.done for score in state.choice.scores):
            self._decide(state.choice)

    def fail(self, work: Work, error: BaseException) -> None:
        """End a work with an error."""
        state = work.data
        self._retire(work)
        if isinstance(state, GenerationState):
            self._collect(state)
            state.finish_reason = "abort"
            state.finished = time.monotonic()
        state.promise.fail(error)
        self.woken.append(state.promise)
        if isinstance(state, ScoreState):
            self.drop_temporary(state.seq)
            if state.choice is not None:
                self.end_choice(state.choice, error)
        elif state.release_when_done or state.seq.closed:
            self.close(state.seq)

    def fail_unless_done(self, work: Work, error: BaseException) -> None:
        """`fail`, for a work that may have ended."""
        if work.state is not WorkState.DONE:
            self.fail(work, error)

    def end_pruned(self, work: Work) -> None:
        """End a work whose branch is pruned."""
        self.fail(work, BranchPrunedError("the branch was pruned while it was running"))

    def end_bad(self, work: Work, result: StepResult, row: int) -> None:
        """End a work whose logits `row` is of no use; the model may have its own word for it."""
        if work.state is WorkState.DONE:
            return
        error = result.row_errors.get(row)
        if error is None and row in result.parts:
            error = NumericsError(
                f"at position {work.first_wanted} of sequence {work.seq.id} the model gave NaN or "
                f"infinity, first in {result.parts[row]}: check its weights and the dtype"
            )
        grammar = getattr(getattr(work.data, "processor", None), "grammar", None)
        if error is None and grammar is not None and grammar.error is not None:
            error = InvalidRequestError(
                f"structured_outputs: at position {work.first_wanted} of sequence {work.seq.id} "
                f"the grammar {grammar.error}; simplify it",
                field="structured_outputs",
            )
        if error is None:
            what = (
                "gave NaN or infinite logits: check the weights and dtype (COTRT_CHECK_LAWS=1 "
                "finds out in which layer)"
            )
            if getattr(work.data, "processor", None) is not None:
                what = (
                    "gave NaN or infinite logits, or no possible token among those that "
                    "allowed_token_ids, logit_bias and bad_words leave"
                )
            error = NumericsError(
                f"at position {work.first_wanted} of sequence {work.seq.id} the model {what}"
            )
        self.fail(work, error)

    def _collect(self, state: GenerationState) -> None:
        """Copy what was sampled: the branch may go on, or be cut."""
        seq = state.seq
        state.tokens = seq.ids(state.start)
        sampled = seq.span.slice_logprobs(state.start, seq.length)
        state.logprobs = [value for value in sampled if value is not None]

    def _retire(self, work: Work) -> None:
        self._scheduler.remove(work)
        work.data.work = None  # else they hold each other until Python looks for cycles
        seq = work.seq
        if seq.work is work:
            seq.work = None
        self._tree.clock += 1
        seq.last_used = self._tree.clock
        if seq.internal and seq.parent is not None:  # a score uses the branch that it is of
            seq.parent.last_used = self._tree.clock

    def _decide(self, choice: ChoiceState) -> None:
        """Append the best option, whose KV its score has left in the tree."""
        values = [sum(score.logprobs) for score in choice.scores]
        if choice.by_mean:
            values = [v / len(ids) for v, ids in zip(values, choice.options)]
        best = values.index(max(values))
        seq = choice.seq
        seq.span.extend(choice.given + choice.options[best])
        self._tree.advance(seq, seq.length)
        choice.promise.set(best)
        self.end_choice(choice, None)

    def end_choice(self, choice: ChoiceState, error: BaseException | None) -> None:
        """End a choose and the scores of it that still run; its branch is free."""
        if choice.seq.choice is not choice:
            return
        choice.seq.choice = None
        if error is not None:
            choice.promise.fail(error)
        self.woken.append(choice.promise)
        for score in choice.scores:
            score.choice = None
            if score.work is not None:
                self.fail(score.work, error or CancelledError("the choice was cancelled"))
            self.drop_temporary(score.seq)
        if choice.seq.closed:
            self.close(choice.seq)

    def close(self, seq: Sequence) -> None:
        """Its handle is gone: without running work its KV is only cached from now on."""
        seq.closed = True
        if not seq.pruned and not seq.is_busy and seq in self._scheduler.sequences:
            self._scheduler.drop_sequence(seq)

    def drop_temporary(self, seq: Sequence) -> None:
        """Forget an internal sequence; its KV is only cached from now on."""
        seq.closed = seq.pruned = True
        if seq in self._scheduler.sequences:
            self._scheduler.drop_sequence(seq)

    def wake(self) -> None:
        """Wake the waiters of all promises that have changed."""
        if self.woken:
            woken, self.woken = self.woken, []
            wake(woken)
