"""Runs one step: copies, the model, the draws and the scores."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cotrt.engine.model import AsynchronousModel, StepModel, is_asynchronous
from cotrt.engine.ranking import Ranking, RankState, rank
from cotrt.engine.state import GenerationState, TokenScores
from cotrt.plan import StepPlan
from cotrt.tree.schedule.step import Step

if TYPE_CHECKING:
    import torch

    from cotrt.engine.records.record_stores import RecordStores
    from cotrt.sampling.sampler import SampleKernel, SampleOutput, SamplingBatch


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step brought, on the host.

    Attributes:
        drawn: tokens, logprobs and non-finite rows of the draws, or None without any.
        scored: one for each scored logit; None where its logits were not finite.
        ranked: one for each draw whose work is a ranking, in their order.
        row_errors: why a logits row is not finite, by its index, where the model says so.
        parts: which part of the model gave a logits row's first NaN or infinity, by its index;
            found out in debug mode only.
        failed: keys of records that could not be loaded.
    """

    drawn: SampleOutput | None
    scored: list[TokenScores | None]
    ranked: list[Ranking]
    row_errors: Mapping[int, Exception] = field(default_factory=dict)
    parts: Mapping[int, str] = field(default_factory=dict)
    failed: Set[bytes] = frozenset()


class Pending:
    """A step that was launched.

    Attributes:
        is_done: `result` returns, or raises, at once.
        stored: puts the records that the step stores where others find them; called by `result`,
            when the device has come there.
        token_ids: its draws on the device, int32 ``[S]``: the input of a step that only lengthens
            it. None where the draws went by the host, or there are none.
    """

    __slots__ = ("_wait", "is_done", "stored", "token_ids")

    def __init__(
        self,
        wait: Callable[[], StepResult],
        *,
        is_done: bool = True,
        token_ids: torch.Tensor | None = None,
    ) -> None:
        self._wait = wait
        self.is_done = is_done
        self.stored: Callable[[], None] = _nothing
        self.token_ids = token_ids

    def result(self) -> StepResult:
        """What the step brought, waited for; raises what it raised. Call it once."""
        try:
            result = self._wait()
        except Exception:
            # What it stores was taken before its rows, and is right.
            with contextlib.suppress(Exception):  # the device is lost: the first error says so
                self.stored()
            raise
        self.stored()
        return result


class ModelRunner:
    """The persistent batch over a model: values of the draws change only where the batch does.

    Args:
        model: the model with its KV cache.
        processed_logprobs: report log-probabilities of the distribution that is drawn from.
        debug: run every step to its end, and find out which part of the model gives NaN.

    Attributes:
        records: carries out the stores and loads of steps; None where there are no tiers.
    """

    def __init__(self, model: StepModel, *, processed_logprobs: bool, debug: bool = False) -> None:
        self._model = model
        self._debug = debug
        self._processed = processed_logprobs
        self._serial = 0
        self._batch: SamplingBatch | None = None
        self.records: RecordStores | None = None
        self._ranked: list[int] = []  # those of the step's draws that are rankings

    def prepare(self, step: Step) -> SamplingBatch | None:
        """The sampling values of the step's draws; call it before anything else may change them."""
        if not step.draws:
            self._serial, self._ranked = 0, []
            return None
        if step.serial == self._serial and self._batch is not None:
            self._batch.positions = self._batch.positions + 1
            return self._batch
        from cotrt.sampling.sampler import SamplingBatch

        states: list[GenerationState | RankState] = [work.data for work in step.draws]
        params = [state.params for state in states]
        processors = [state.processor for state in states]
        self._serial = step.serial
        self._ranked = [i for i, state in enumerate(states) if type(state) is RankState]
        self._batch = SamplingBatch(
            sample_rows=step.plan.sample_rows,
            temperature=np.array([p.temperature for p in params], np.float32),
            top_k=np.array([p.top_k for p in params], np.int32),
            top_p=np.array([p.top_p for p in params], np.float32),
            min_p=np.array([p.min_p for p in params], np.float32),
            seeds=np.array([state.seed for state in states], np.uint64),
            epochs=np.array([state.epoch for state in states], np.uint32),
            positions=np.array([work.target for work in step.draws], np.int64),
            processors=processors if any(p is not None for p in processors) else None,
            num_logprobs=np.array([state.num_logprobs for state in states], np.int32),
            processed_logprobs=self._processed,
        )
        return self._batch

    def launch(
        self,
        step: Step,
        batch: SamplingBatch | None,
        num_top: list[int],
        before: Pending | None = None,
    ) -> Pending:
        """Start a step. Takes no lock and touches nothing that other threads see.

        A model that runs synchronously has run when this returns. Nothing is raised here: what
        goes wrong comes out of ``Pending.result``.

        Args:
            num_top: how many of the likeliest tokens each scored logit reports; -1 for none and
                no rank.
            before: the step in flight whose draws are this step's input.
        """
        stored = _nothing
        try:
            if is_asynchronous(self._model) and not self._debug:
                stored = self._store(step.plan)
                pending = self._enqueue(self._model, step, batch, num_top, before)
            else:
                result = self.run(step, batch, num_top)
                pending = Pending(lambda: result)
        except Exception as error:
            pending = _failed(error)
        pending.stored = stored
        return pending

    def run(self, step: Step, batch: SamplingBatch | None, num_top: list[int]) -> StepResult:
        """Compute the step to its end; the arguments are those of `launch`."""
        from cotrt.sampling.sampler import kernel_for

        self._store(step.plan)()
        failed = self._move(step.plan)
        if not len(step.plan.input_ids):
            return StepResult(None, [], [], failed=failed)
        began = time.perf_counter()
        logits = self._model.run(step.plan)
        kernel = kernel_for(self._model.backend_name)
        result = self._finish(logits, step, batch, num_top, kernel, failed)
        self._note_step(len(step.plan.input_ids), began)
        return self._with_parts(result, step.plan) if self._debug else result

    def _with_parts(self, result: StepResult, plan: StepPlan) -> StepResult:
        """Where a row is not finite, run the step again to learn where that begins."""
        is_bad = result.drawn is not None and bool(result.drawn.bad.any())
        find = getattr(self._model, "find_not_finite", None)
        if find is None or not (is_bad or None in result.scored):
            return result
        parts = {row: name for row, name in enumerate(find(plan)) if name is not None}
        return replace(result, parts=parts)

    def _store(self, plan: StepPlan) -> Callable[[], None]:
        """Take what the step stores, before anything else of it; call what this returns later."""
        if plan.stores and self.records is not None:
            return self.records.store(plan.stores)
        return _nothing

    def _move(self, plan: StepPlan) -> frozenset[bytes]:
        """Copies and loads, before a step's rows. Keys that could not be had."""
        if plan.copies:
            self._model.copy_blocks(plan.copies)
        if plan.loads and self.records is not None:
            return frozenset(self.records.load(plan.loads))
        return frozenset()

    def _note_step(self, num_tokens: int, began: float) -> None:
        if self.records is not None:
            self.records.note_step(num_tokens, time.perf_counter() - began)

    def _enqueue(
        self,
        model: AsynchronousModel,
        step: Step,
        batch: SamplingBatch | None,
        num_top: list[int],
        before: Pending | None,
    ) -> Pending:
        """Draw on the device where nothing but tokens and their logprobs is asked for."""
        from cotrt.sampling.sampler import SampleOutput, sample_on_device, samples_on_device

        plan = step.plan
        failed = self._move(plan)
        if not len(plan.input_ids):
            return Pending(lambda: StepResult(None, [], [], failed=failed))
        # What waits holds none of these: a step would hold the one before it, and all before that.
        num_tokens, runs_ahead, began = len(plan.input_ids), before is not None, time.perf_counter()
        logits = model.run(plan, None if before is None else before.token_ids)
        if not step.draws and not step.scored:
            copied = model.fetch(logits)  # of no rows: it says when the KV is there

            def wait_for_kv() -> StepResult:
                copied.wait()
                self._note_step(num_tokens, began)
                return StepResult(None, [], [], failed=failed)

            return Pending(wait_for_kv, is_done=False)
        if (
            batch is None
            or step.scored
            or self._ranked
            or not samples_on_device(batch, model.sample)
        ):
            kernel = _to_host(model.sample)
            result = self._finish(logits, step, batch, num_top, kernel, failed)
            return Pending(lambda: result)
        drawn = sample_on_device(logits, batch, model.sample)
        copies = model.fetch(*drawn)

        def wait_for_draws() -> StepResult:
            token_ids, logprobs, bad = (tensor.numpy() for tensor in copies.wait())
            if not runs_ahead:
                self._note_step(num_tokens, began)
            return StepResult(SampleOutput(token_ids, logprobs, bad), [], [], failed=failed)

        return Pending(wait_for_draws, is_done=False, token_ids=drawn[0])

    def _finish(
        self,
        logits: torch.Tensor,
        step: Step,
        batch: SamplingBatch | None,
        num_top: list[int],
        kernel: SampleKernel | None,
        failed: frozenset[bytes],
    ) -> StepResult:
        """Scores, draws and rankings, on the host when this returns."""
        from cotrt.sampling.sampler import sample_batch

        plan = step.plan
        scored = _score(logits, plan.scored_rows, plan.scored_tokens, num_top)
        drawn = None if batch is None else sample_batch(logits, batch, kernel)
        ranked: list[Ranking] = []
        if self._ranked:
            states = [step.draws[i].data for i in self._ranked]
            ranked = rank(logits, plan.sample_rows[self._ranked], states)
        row_errors = getattr(self._model, "row_errors", {})
        return StepResult(drawn, scored, ranked, row_errors, failed=failed)


def _nothing() -> None:
    pass


def _failed(error: Exception) -> Pending:
    def fail() -> StepResult:
        raise error

    return Pending(fail)


def _to_host(kernel: SampleKernel) -> SampleKernel:
    """A kernel with results on the device as one with numpy arrays."""

    def sample(*arguments: Any, **options: Any) -> Any:
        return tuple(result.cpu().numpy() for result in kernel(*arguments, **options))

    return sample


def _score(
    logits: torch.Tensor,
    rows: npt.NDArray[np.int32],
    tokens: npt.NDArray[np.int32],
    num_top: list[int],
) -> list[TokenScores | None]:
    """Raw log-softmax of given tokens, and the likeliest ones where asked for."""
    if not len(rows):
        return []
    import torch

    from cotrt.sampling.sampler import token_logprobs

    values, tops = token_logprobs(
        logits,
        torch.from_numpy(rows.astype(np.int64)).to(logits.device),
        torch.from_numpy(tokens.astype(np.int64)).to(logits.device),
        np.array(num_top, np.int32),
    )
    return [
        None if np.isnan(value) else TokenScores(value, tops.get(i))
        for i, value in enumerate(values.tolist())
    ]
