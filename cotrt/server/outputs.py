"""Outputs as they grow: pieces of text with their tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass, field

from cotrt.engine.state import GenerationState
from cotrt.program.handle import Generation
from cotrt.program.submission import Submission
from cotrt.sampling.logprobs import Logprob
from cotrt.server.errors import ApiError


@dataclass(slots=True)
class Piece:
    """What has come of an output since the last piece.

    Attributes:
        text: text that is final.
        token_ids: tokens sampled.
        logprobs: their log-probabilities; empty where nobody reads the pieces one by one.
        scores: one dict a token where logprobs were asked for, else empty.
        finish_reason: in the last piece, else None.
        stop_reason: what matched, in the last piece.
    """

    text: str
    token_ids: list[int]
    scores: list[dict[int, Logprob]] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


async def read_pieces(generation: Generation, tags: Collection[str] = ()) -> AsyncIterator[Piece]:
    """All pieces of an output; the last one has the finish_reason.

    Args:
        generation: what makes it.
        tags: special tokens that the text shows even where others are left out.

    Raises:
        CotrtError: what the work ended with.
    """
    runtime, state = generation._runtime, generation._state
    scored = state.params.logprobs is not None
    text = runtime.stream_text(state, tags) if tags else None
    seen, is_over = 0, False
    async for chunk in generation:
        ids = chunk.token_ids
        scores = []
        if scored:
            given = state.scores[seen : seen + len(ids)]
            scores = [runtime.logprob_dict(i, score) for i, score in zip(ids, given)]
        seen += len(ids)
        shown = chunk.text
        if text is not None:
            # The token that ends an output comes together with its end.
            is_over = state.promise.done and seen == len(state.tokens)
            shown = text.append(ids, is_over)
        yield Piece(shown, ids, scores, chunk.logprobs)
    end = Piece("" if text is None or is_over else text.append([], True), [])
    end.finish_reason, end.stop_reason = state.finish_reason, state.stop_reason
    yield end


def states_of(submission: Submission) -> list[GenerationState]:
    """The engine's states, one an output, prompt by prompt."""
    return [generation._state for generation in submission]


def finish_reason(reason: str | None) -> str:
    """OpenAI's word for the end of an output.

    Raises:
        ApiError: it was cut off; only the end of the server does that to a client that listens.
    """
    if reason == "abort":
        raise ApiError(503, "the server shut down before the work was done", code="shutting_down")
    return str(reason)
