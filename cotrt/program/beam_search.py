"""Beam search: beams are forks of one root, so however wide it is, no token is computed twice.

Each round ranks the likely next tokens of every beam in one engine step. The best candidates over
all beams become the new beams: the first child of a beam goes on in its place, others are forks.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from cotrt.engine.ranking import Ranking, RankState
from cotrt.errors import CotrtError, EngineDeadError, InvalidRequestError, KVCacheExhaustedError
from cotrt.options.sampling import BeamSearchParams, SamplingParams
from cotrt.outputs import BeamSearchOutput, BeamSequence
from cotrt.program.handle import fresh, warn_inside_loop
from cotrt.program.submission import as_prompts, named

if TYPE_CHECKING:
    from cotrt.engine.state import TokenSequence
    from cotrt.program.runtime import Runtime


def beam_search(runtime: Runtime, prompts: Any, params: BeamSearchParams) -> list[BeamSearchOutput]:
    """Search for the likeliest sequences after each prompt; all prompts run together.

    The score of a sequence is ``cum_logprob / num_generated ** length_penalty``. A finished beam
    leaves the running ones. A prompt is done when ``beam_width`` are finished and the best running
    beam could not beat the worst of them at its present length. Where the model makes fewer than
    ``beam_width`` sequences possible, fewer come back.

    Args:
        runtime: the LLM's.
        prompts: as in `LLM.generate`, branches aside.
        params: width, length, penalty and temperature.

    Raises:
        InvalidRequestError, PromptTooLongError, KVCacheExhaustedError: a bad prompt, named by
            index; nothing has run then.
        NumericsError: NaN or infinite logits.
        EngineDeadError: the engine has stopped.
    """
    runtime.check()
    if not isinstance(params, BeamSearchParams):
        raise InvalidRequestError(f"params must be a BeamSearchParams, not {type(params).__name__}")
    warn_inside_loop()
    searches = [_checked(runtime, i, p, params) for i, p in enumerate(as_prompts(prompts))]
    if len(searches) == 1:
        searches[0].index = None
    running = searches
    try:
        with runtime.engine.lock:
            runtime.check()
            for search in searches:
                search.start()
        while running:
            for search in running:
                search.wait()
            with runtime.engine.lock:
                for search in running:
                    search.advance()
            running = [search for search in running if search.beams]
    finally:
        runtime.on_leaving(lambda: _release(runtime, searches))
    return [search.output() for search in searches]


def _release(runtime: Runtime, searches: Iterable[_Search]) -> None:
    with runtime.engine.lock:
        for search in searches:
            search.release()


def _checked(runtime: Runtime, index: int, prompt: Any, params: BeamSearchParams) -> _Search:
    from cotrt.program.branch import Branch

    try:
        if isinstance(prompt, Branch):
            raise InvalidRequestError(
                "beam_search starts from text or token ids, not from a Branch: give b.token_ids"
            )
        ids = runtime.encode_prompt(prompt)[1]
        limit = SamplingParams(max_tokens=params.max_tokens)
        num_tokens = runtime.max_length(limit, len(ids), None) - len(ids)
    except CotrtError as error:
        raise named(error, index, 2 if index else 1) from error.__cause__
    return _Search(runtime, index, ids, params, num_tokens)


@dataclass(slots=True, eq=False)
class _Beam:
    """A running beam: its sequence holds every token but for those that no step has computed."""

    seq: TokenSequence
    cum_logprob: float
    state: RankState | None = None


@dataclass(slots=True, eq=False)
class _Search:
    """The beams of one prompt.

    Attributes:
        index: of the prompt; None where it is the only one.
        num_tokens: generated tokens at which every sequence ends.
        length: tokens generated so far.
        finished: ``(score, sequence)``, at most beam_width, best first.
    """

    runtime: Runtime
    index: int | None
    prompt: list[int]
    params: BeamSearchParams
    num_tokens: int
    root: TokenSequence | None = None
    length: int = 0
    beams: list[_Beam] = field(default_factory=list)
    finished: list[BeamSequence] = field(default_factory=list)

    @property
    def eos_ids(self) -> frozenset[int]:
        return frozenset() if self.params.ignore_eos else self.runtime.eos_ids

    def start(self) -> None:
        engine = self.runtime.engine
        self.root = engine.table.new_root(self.prompt)
        self.beams = [_Beam(engine.table.fork(self.root, internal=True), 0.0)]
        self._rank()

    def _rank(self) -> None:
        """Ask for what may follow each beam."""
        engine, params = self.runtime.engine, self.params
        count = self._num_candidates
        for beam in self.beams:
            beam.state = RankState(beam.seq, count, params.temperature or 1.0)
            engine.start_ranking(beam.state)

    @property
    def _num_candidates(self) -> int:
        """Enough for a full width of beams that go on, if the best of each beam all end here."""
        return max(2, 1 + len(self.eos_ids)) * self.params.beam_width

    def wait(self) -> None:
        for beam in self.beams:
            assert beam.state is not None
            promise = beam.state.promise
            promise.wait(lambda p=promise: p.done)  # type: ignore[misc]

    def advance(self) -> None:
        """Take the round's rankings: end, drop, extend and fork beams. Under the lock."""
        rankings = []
        for beam in self.beams:
            assert beam.state is not None
            error = beam.state.promise.error
            if isinstance(error, KVCacheExhaustedError) and self.length:
                self._end_here()
                return
            if error is not None:
                self._raise(error)
            rankings.append(beam.state.promise.value)
        self._choose(rankings)
        if self.beams:
            self._rank()

    def _choose(self, rankings: list[Ranking]) -> None:
        self.length += 1
        width, eos_ids = self.params.beam_width, self.eos_ids
        scores = np.concatenate(
            [b.cum_logprob + r.logprobs.astype(np.float64) for b, r in zip(self.beams, rankings)]
        )
        tokens = np.concatenate([ranking.ids for ranking in rankings])
        owners = np.repeat(np.arange(len(rankings)), [len(r.ids) for r in rankings])
        order = np.argsort(-scores, kind="stable")[: self._num_candidates]
        going: list[tuple[int, int, float]] = []
        for place, index in enumerate(order.tolist()):
            owner, token, score = int(owners[index]), int(tokens[index]), float(scores[index])
            if token in eos_ids or self.length == self.num_tokens:
                if place < width:
                    reason = "stop" if token in eos_ids else "length"
                    self._finish(self.beams[owner], [token], score, reason)
            elif len(going) < width:
                going.append((owner, token, score))
        if not self._may_improve(going[0][2] if going else None):
            going = []
        self._grow(going)

    def _finish(self, beam: _Beam, last: list[int], cum_logprob: float, reason: str) -> None:
        tokens = beam.seq.ids(len(self.prompt)) + last
        score = cum_logprob / len(tokens) ** self.params.length_penalty
        self.finished.append(BeamSequence(tokens, "", cum_logprob, score, reason))
        self.finished.sort(key=lambda sequence: -sequence.score)
        del self.finished[self.params.beam_width :]

    def _may_improve(self, best: float | None) -> bool:
        if best is None:
            return False
        if len(self.finished) < self.params.beam_width:
            return True
        return bool(best / self.length**self.params.length_penalty > self.finished[-1].score)

    def _grow(self, going: list[tuple[int, int, float]]) -> None:
        """The beams of the next round, out of ``(beam, token, cum_logprob)``, best first."""
        engine = self.runtime.engine
        children: dict[int, list[tuple[int, int, float]]] = {}
        for place, (owner, token, score) in enumerate(going):
            children.setdefault(owner, []).append((place, token, score))
        grown: list[_Beam | None] = [None] * len(going)
        for index, beam in enumerate(self.beams):
            mine = children.get(index, [])
            forks = [engine.table.fork(beam.seq, internal=True) for _ in mine[1:]]
            for seq, (place, token, score) in zip([beam.seq, *forks], mine):
                engine.append_sampled(seq, token, score - beam.cum_logprob)
                grown[place] = _Beam(seq, score)
            if not mine:
                engine.discard(beam.seq)
        self.beams = [beam for beam in grown if beam is not None]

    def _end_here(self) -> None:
        """The pool holds no longer sequence: all beams end as they are."""
        self._cancel()
        for beam in self.beams:
            self._finish(beam, [], beam.cum_logprob, "length")
        self._grow([])

    def _raise(self, error: BaseException) -> None:
        if isinstance(error, (EngineDeadError, CancelledError)) or self.index is None:
            raise fresh(error)
        if isinstance(error, CotrtError):
            raise named(error, self.index, 2) from error.__cause__
        raise fresh(error)

    def _cancel(self) -> None:
        for beam in self.beams:
            if beam.state is not None:
                self.runtime.engine.cancel(beam.state)

    def release(self) -> None:
        """Give up what is left of the search; the prompt's KV stays in the cache."""
        self._cancel()
        for beam in self.beams:
            self.runtime.engine.discard(beam.seq)
        self.beams = []
        if self.root is not None:
            self.runtime.engine.table.close(self.root)
            self.root = None

    def output(self) -> BeamSearchOutput:
        """The sequences, best first, with their texts as a generate's."""
        from cotrt.sampling.output_text import OutputText

        sequences, shown = [], SamplingParams()
        for found in self.finished:
            text = ""
            if self.runtime.tokenizer is not None:
                made = OutputText(self.runtime.tokenizer, shown, self.prompt)
                made.append_all(found.tokens, ended_by_token=found.finish_reason == "stop")
                made.finish()
                text = made.text
            sequences.append(
                BeamSequence(
                    found.tokens, text, found.cum_logprob, found.score, found.finish_reason
                )
            )
        return BeamSearchOutput(sequences)
