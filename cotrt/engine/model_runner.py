"""Runs one step: copies, the model, the draws and the scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from cotrt.engine.model import StepModel
from cotrt.engine.ranking import Ranking, RankState, rank
from cotrt.engine.state import GenerationState, TokenScores
from cotrt.tree.step import Step

if TYPE_CHECKING:
    import torch

    from cotrt.sampling.sampler import SampleOutput, SamplingBatch


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step brought, on the host.

    Attributes:
        drawn: tokens, logprobs and non-finite rows of the draws, or None without any.
        scored: one for each scored logit; None where its logits were not finite.
        ranked: one for each draw whose work is a ranking, in their order.
        row_errors: why a logits row is not finite, by its index, where the model says so.
    """

    drawn: SampleOutput | None
    scored: list[TokenScores | None]
    ranked: list[Ranking]
    row_errors: Mapping[int, Exception] = field(default_factory=dict)


class ModelRunner:
    """The persistent batch over a model: values of the draws change only where the batch does.

    Args:
        model: the model with its KV cache.
        processed_logprobs: report log-probabilities of the distribution that is drawn from.
    """

    def __init__(self, model: StepModel, *, processed_logprobs: bool) -> None:
        self._model = model
        self._processed = processed_logprobs
        self._serial = 0
        self._batch: SamplingBatch | None = None
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

    def run(self, step: Step, batch: SamplingBatch | None, num_top: list[int]) -> StepResult:
        """Compute the step. Takes no lock and touches nothing that other threads see.

        Args:
            num_top: how many of the likeliest tokens each scored logit reports; -1 for none and
                no rank.
        """
        from cotrt.sampling.sampler import kernel_for, sample_batch

        plan = step.plan
        if plan.copies:
            self._model.copy_blocks(plan.copies)
        logits = self._model.run(plan)
        scored = _score(logits, plan.scored_rows, plan.scored_tokens, num_top)
        kernel = kernel_for(self._model.backend_name)
        drawn = None if batch is None else sample_batch(logits, batch, kernel)
        ranked: list[Ranking] = []
        if self._ranked:
            states = [step.draws[i].data for i in self._ranked]
            ranked = rank(logits, plan.sample_rows[self._ranked], states)
        row_errors = getattr(self._model, "row_errors", {})
        return StepResult(drawn, scored, ranked, row_errors)


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
