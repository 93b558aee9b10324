"""What the engine remembers of a running generate or score, and its result when it ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cotrt.engine.promise import Promise
from cotrt.options.sampling import SamplingParams
from cotrt.tree.schedule.work import Work
from cotrt.tree.sequence import Sequence

if TYPE_CHECKING:
    from cotrt.sampling.logprobs import TopLogprobs
    from cotrt.sampling.output_text import OutputText
    from cotrt.sampling.processors import LogitsProcessor


TokenSequence = Sequence  # the name under which the program API knows it


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Log-probability of the sampled or given token; its rank and the likeliest, if asked for."""

    logprob: float
    top: TopLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Tail:
    """Tokens that were cut off a sequence: ids, log-probabilities, and whether each was sampled."""

    ids: list[int]
    logprobs: list[float | None]
    sampled: bytes


@dataclass(slots=True, eq=False)
class GenerationState:
    """One generate on one sequence.

    Attributes:
        params: what was asked for.
        start: length of the sequence when it began.
        max_length: absolute length at which it ends with "length".
        min_length: absolute length before which no stop counts.
        eos_ids, stop_ids: token ids that end it; eos_ids is empty under ignore_eos.
        seed, epoch: keys of its draws.
        processor: penalties, masks and biases, or None.
        history: sampled tokens that the processor looks at, growing; None without one.
        watch: looks for stop strings in the text as it grows; None without any.
        context: the last few tokens before the generated ones, for detokenising.
        promise: done when it ends.
        work: its work, until it ends.
        scores: of each sampled token, where more than its logprob was asked for.
        prompt_scores: of each prompt token from the second on, where asked for.
        tokens, logprobs: a copy of what was sampled, made at the end.
        finish_reason: "stop", "length" or "abort"; stop_reason: what matched.
        ended_by_eos: an end-of-sequence token ended it.
        num_cached: tokens whose KV was there or being computed when first scheduled.
        created, first_scheduled, first_token, finished: monotonic seconds.
    """

    params: SamplingParams
    seq: Sequence
    start: int
    max_length: int
    min_length: int
    eos_ids: frozenset[int]
    stop_ids: frozenset[int]
    seed: int
    epoch: int
    processor: LogitsProcessor | None = None
    watch: OutputText | None = None
    context: list[int] = field(default_factory=list)
    promise: Promise = field(default_factory=Promise)
    work: Work | None = None
    scores: list[TokenScores] = field(default_factory=list)
    prompt_scores: dict[int, TokenScores] = field(default_factory=dict)
    history: list[int] | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    ended_by_eos: bool = False
    num_cached: int = 0
    created: float = 0.0
    first_scheduled: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0
    release_when_done: bool = False

    @property
    def matched_text(self) -> bool:
        """A stop string ended it."""
        return self.finish_reason == "stop" and isinstance(self.stop_reason, str)

    @property
    def num_logprobs(self) -> int:
        return -1 if self.params.logprobs is None else self.params.logprobs


@dataclass(slots=True, eq=False)
class ScoreState:
    """One score: a forced text whose tokens' log-probabilities are wanted.

    Attributes:
        seq: a temporary fork that holds the forced tokens.
        first: position of the first scored token.
        promise: its value is the list of log-probabilities.
        choice: the choose that it is part of, or None.
    """

    seq: Sequence
    first: int
    promise: Promise = field(default_factory=Promise)
    work: Work | None = None
    logprobs: list[float] = field(default_factory=list)
    choice: ChoiceState | None = None


@dataclass(slots=True, eq=False)
class ChoiceState:
    """One choose: scores of all options, and the branch that the best is appended to.

    Attributes:
        scores: one an option.
        given, options: token ids.
        by_mean: compare the mean, not the sum.
        promise: its value is the index of the best option.
    """

    seq: Sequence
    scores: list[ScoreState]
    given: list[int]
    options: list[list[int]]
    by_mean: bool
    promise: Promise = field(default_factory=Promise)
