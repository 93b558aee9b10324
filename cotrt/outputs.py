"""Results as plain values: completions, scores, choices, beams, memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cotrt.sampling.logprobs import Logprob


@dataclass(slots=True)
class CompletionOutput:
    """One output of a prompt, or of one generate on a branch.

    Attributes:
        index: which of the prompt's ``n`` outputs it is.
        text: the generated text, cut at a stop string.
        token_ids: every sampled token, a stop token or a stop string's tokens included.
        cumulative_logprob: sum of the sampled tokens' log-probabilities.
        logprobs: where asked for, one dict a token, from token id to `Logprob`.
        finish_reason: "stop", "length" or "abort".
        stop_reason: the stop string or stop token id that matched; None for end-of-sequence;
            "kv_capacity" where the branch alone outgrew the KV pool.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """When things happened, in seconds of ``time.monotonic()``; None where they did not.

    Attributes:
        arrival_time: the request was made.
        first_token_time: its first token was sampled.
        finished_time: its last output ended.
    """

    arrival_time: float
    first_token_time: float | None
    finished_time: float | None


@dataclass(slots=True)
class RequestOutput:
    """All outputs of one prompt.

    Attributes:
        request_id: unique in the process.
        prompt: the prompt's text, of a chat as its template wrote it; None where token ids were
            given.
        prompt_token_ids: its tokens.
        outputs: one an ``n``.
        prompt_logprobs: where asked for, one entry a prompt token, the first None.
        num_cached_tokens: prompt tokens whose KV was there, or being computed by another, when
            the request was first scheduled; the last one never counts.
        finished: always True; for those who know vLLM.
        metrics: when it arrived, began and ended.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    finished: bool = True
    metrics: RequestMetrics | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a generation as it grows.

    Attributes:
        text: text that is final; may be empty while a character or a stop string is incomplete.
        token_ids: the tokens sampled since the last chunk.
        logprobs: their log-probabilities.
    """

    text: str
    token_ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True, slots=True)
class Score:
    """Log-probability of a forced continuation.

    Attributes:
        token_ids: its tokens.
        logprobs: one a token, raw log-softmax.
    """

    token_ids: list[int]
    logprobs: list[float]

    @property
    def total(self) -> float:
        """Sum of the log-probabilities."""
        return sum(self.logprobs)

    @property
    def mean(self) -> float:
        """Mean of the log-probabilities."""
        return sum(self.logprobs) / len(self.logprobs)


@dataclass(frozen=True, slots=True)
class Choice:
    """The option that `Branch.choose` appended.

    Attributes:
        index: its place among the options.
        option: the option as it was given.
        scores: the score of every option.
    """

    index: int
    option: str | list[int]
    scores: list[Score]


@dataclass(frozen=True, slots=True)
class BeamSequence:
    """One sequence that beam search found.

    Attributes:
        tokens: generated token ids; the end-of-sequence token that ended it is included.
        text: their text, special tokens left out.
        cum_logprob: sum of the log-probabilities.
        score: ``cum_logprob / len(tokens) ** length_penalty``.
        finish_reason: "stop" or "length".
    """

    tokens: list[int]
    text: str
    cum_logprob: float
    score: float
    finish_reason: str


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The sequences of one prompt, best first."""

    sequences: list[BeamSequence] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class BranchKV:
    """Where a branch's KV is, at one moment.

    Attributes:
        num_tokens: tokens of the branch.
        computed_tokens: leading ones whose KV is there.
        blocks: blocks that hold it.
        shared_blocks: those that another branch or running work holds too.
        private_blocks: those that it holds alone.
        bytes: size of all its blocks.
        location: "device", "host", "disk", or "none" where nothing is there.
    """

    num_tokens: int
    computed_tokens: int
    blocks: int
    shared_blocks: int
    private_blocks: int
    bytes: int
    location: str


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """The KV pool between two steps, in blocks and tokens; ``free + in_use + cached == total``.

    Attributes:
        total: blocks of the pool.
        free: blocks that hold nothing.
        in_use: blocks held by live branches and running work.
        cached: blocks without a holder whose KV a later prompt may reuse.
        host, disk: blocks kept in host memory and on disk.
        tokens_stored: filled slots of the blocks in use, each block once.
        tokens_held: computed tokens as the branches see them, shared ones counted by each.
        block_size: tokens a block.
    """

    total: int
    free: int
    in_use: int
    cached: int
    host: int
    disk: int
    tokens_stored: int
    tokens_held: int
    block_size: int

    @property
    def sharing(self) -> float:
        """Tokens held for each token stored; 1.0 where nothing is shared."""
        return self.tokens_held / self.tokens_stored if self.tokens_stored else 1.0

    @property
    def waste(self) -> float:
        """Share of the slots in use that are empty."""
        slots = self.in_use * self.block_size
        return (slots - self.tokens_stored) / slots if slots else 0.0
