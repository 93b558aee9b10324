"""`POST /v1/completions`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from cotrt.engine.state import GenerationState
from cotrt.options.sampling import MAX_LOGPROBS, SamplingParams
from cotrt.program.submission import Submission
from cotrt.sampling.token_texts import TokenTexts
from cotrt.server.errors import ApiError, blaming
from cotrt.server.openai_fields import OpenAIFields
from cotrt.server.outputs import Piece, finish_reason, read_pieces, states_of
from cotrt.server.request_run import chunk_sender, respond, usage_of
from cotrt.server.sampling_fields import TokenId
from cotrt.server.service import Service
from cotrt.server.streaming import each_at_once
from cotrt.server.token_logprobs import CompletionLogprobs, SampledTexts, Scores
from cotrt.server.wire import Emit, read_model

DEFAULT_MAX_TOKENS = 16

Ids = Annotated[list[TokenId], Field(min_length=1)]
Prompts = (
    str
    | Ids
    | Annotated[list[str], Field(min_length=1)]
    | Annotated[list[Ids], Field(min_length=1)]
)


class CompletionRequest(OpenAIFields):
    """A completion. ``max_tokens`` is 16 where it is left out."""

    prompt: Prompts
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    return_tokens_as_token_ids: bool = False
    best_of: Literal[1] | None = None

    @property
    def names(self) -> dict[str, str]:
        """The request's own names for what errors blame by another; "": what it asks about."""
        return {**super().names, "": "prompt"}

    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


async def create_completion(request: Request, service: Service) -> Response:
    """Complete one or several prompts, ``n`` times each."""
    asked = await read_model(request, service.options, CompletionRequest)
    service.check_model(asked.model)
    prompts = asked.prompts()
    if len(prompts) > service.options.max_prompts:
        raise ApiError(
            400,
            f"{len(prompts)} prompts, the limit is {service.options.max_prompts}",
            param="prompt",
        )
    with blaming(asked.names):
        params = await service.params_of(_fields(asked, service))
        ticket = service.admission.take(asked.check_outputs(len(prompts), service.options))
        try:
            encoded = await service.encode(_encode, service, prompts, asked.add_special_tokens)
            run = _Run(service, asked, params, prompts, encoded)
        except BaseException:
            ticket.release()
            raise

    return await respond(request, service, run, ticket, asked)


def _fields(asked: CompletionRequest, service: Service) -> dict[str, Any]:
    """Fields for `SamplingParams`."""
    fields = asked.overrides(service.options)
    limit = DEFAULT_MAX_TOKENS if asked.max_tokens is None else asked.max_tokens
    prompt_logprobs = asked.prompt_logprobs
    if asked.echo and asked.logprobs is not None and prompt_logprobs is None:
        prompt_logprobs = asked.logprobs
    fields.update(n=asked.n, max_tokens=limit, logprobs=asked.logprobs)
    grammar = asked.grammar(service.options.max_text_chars)
    return {**fields, "prompt_logprobs": prompt_logprobs, "structured_outputs": grammar}


def _encode(
    service: Service, prompts: Sequence[str | list[int]], add_special_tokens: bool
) -> list[list[int]]:
    runtime = service.runtime
    encoded = []
    for prompt in prompts:
        if isinstance(prompt, str) and prompt and not add_special_tokens:
            ids = runtime._need_tokenizer().encode(prompt, add_special_tokens=False)
        else:
            _, ids = runtime.encode_prompt(prompt)
        encoded.append(list(ids))
    return encoded


class _Run:
    """One request under way."""

    def __init__(
        self,
        service: Service,
        asked: CompletionRequest,
        params: SamplingParams,
        given: Sequence[str | list[int]],
        prompts: list[list[int]],
    ) -> None:
        self._given = given
        self._service = service
        self._asked = asked
        self._params = params
        self._prompts = prompts
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": asked.model or service.names[0],
        }
        self._submission: Submission = service.start(prompts, params, DEFAULT_MAX_TOKENS)
        self._states = states_of(self._submission)

    def cleanup(self) -> None:
        """Stop what still runs, and count."""
        self._submission.cancel()
        self._service.metrics.observe(self._states)

    async def whole(self) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for index in range(len(self._submission)):
            choice = _Choice(self, index)
            parts = []
            if self._asked.echo:
                parts.append(await choice.echo())
            # One read at the end: nobody looks at the pieces on the way.
            output = await self._submission[index]
            state = self._states[index]
            scores = [
                self._service.runtime.logprob_dict(i, s) for i, s in zip(state.tokens, state.scores)
            ]
            piece = Piece(output.text, output.token_ids, scores)
            piece.finish_reason, piece.stop_reason = output.finish_reason, output.stop_reason
            parts.append(choice.part(piece))
            whole = _joined(parts, choice.prompt_logprobs())
            if self._asked.return_token_ids:
                whole["prompt_token_ids"] = choice.prompt
            choices.append(whole)
        return {**self._head, "choices": choices, "usage": self._usage()}

    async def stream(self, emit: Emit) -> None:
        asked = self._asked
        send = chunk_sender(emit, self._head, asked, self._usage)

        async def one(index: int) -> None:
            choice = _Choice(self, index)
            first: dict[str, Any] = {}
            if asked.return_token_ids:
                first["prompt_token_ids"] = choice.prompt
            if asked.echo:
                await send({**(await choice.echo()), **first})
                first = {}
            async for piece in read_pieces(self._submission[index]):
                part = {**choice.part(piece), **first}
                if piece.finish_reason is not None and self._params.prompt_logprobs is not None:
                    part["prompt_logprobs"] = choice.prompt_logprobs()
                await send(part)
                first = {}

        await each_at_once(one, len(self._submission))
        if asked.wants_usage:
            await send(None)

    def _usage(self) -> dict[str, Any]:
        return usage_of(
            self._states,
            prompt_tokens=sum(map(len, self._prompts)),
            outputs_a_prompt=self._asked.n,
        )


class _Choice:
    """One choice: its text, and the log-probabilities that belong to it."""

    def __init__(self, run: _Run, index: int) -> None:
        self._run = run
        self.index = index
        asked = run._asked
        self.prompt = run._prompts[index // asked.n]
        self._first: GenerationState = run._states[index - index % asked.n]
        self._tokenizer = run._service.runtime.tokenizer
        self._logprobs = None
        if asked.logprobs is not None:
            as_ids = asked.return_tokens_as_token_ids
            self._logprobs = CompletionLogprobs(asked.logprobs, as_ids=as_ids)
            self._texts = SampledTexts(self._tokenizer, run._states[index])

    async def echo(self) -> dict[str, Any]:
        """The prompt as the first part; its log-probabilities come with the first token."""
        ids = self.prompt
        hidden = int(self._begins_with_added_bos())
        texts = TokenTexts(self._tokenizer, skip_special_tokens=False)
        shown = [""] * hidden + texts.append(ids[hidden:])
        if shown:
            shown[-1] += texts.flush()
        logprobs = None
        if self._logprobs is not None:
            state = self._first

            def has_scores() -> bool:
                return state.promise.done or state.seq.length > state.start

            await state.promise.wait_async(has_scores, progress=True)
            scores = self._prompt_scores()
            logprobs = self._logprobs.part(ids, shown, scores)
        return self._part("".join(shown), logprobs, ids)

    def _begins_with_added_bos(self) -> bool:
        """The tokenizer put a BOS before a text that had none."""
        given = self._run._given[self.index // self._run._asked.n]
        bos = getattr(self._tokenizer, "bos_token_id", None)
        if bos is None or not isinstance(given, str) or self.prompt[:1] != [bos]:
            return False
        return not given.startswith(self._tokenizer.decode([bos]))

    def part(self, piece: Piece) -> dict[str, Any]:
        """What a piece adds."""
        logprobs = None
        if self._logprobs is not None and (piece.token_ids or piece.finish_reason is None):
            texts = self._texts.append(piece.token_ids)
            logprobs = self._logprobs.part(piece.token_ids, texts, piece.scores)
        part = self._part(piece.text, logprobs, piece.token_ids)
        if piece.finish_reason is not None:
            part["finish_reason"] = finish_reason(piece.finish_reason)
            part["stop_reason"] = piece.stop_reason
        return part

    def prompt_logprobs(self) -> list[dict[str, Any] | None] | None:
        """vLLM's shape, where asked for by its name."""
        if self._run._asked.prompt_logprobs is None:
            return None
        return [
            None
            if entries is None
            else {
                str(token): {
                    "logprob": max(entry.logprob, -9999.0),
                    "rank": entry.rank,
                    "decoded_token": entry.decoded_token,
                }
                for token, entry in entries.items()
            }
            for entries in self._prompt_scores()
        ]

    def _prompt_scores(self) -> list[Scores]:
        runtime, scores = self._run._service.runtime, self._first.prompt_scores
        return [
            runtime.logprob_dict(token, scores[i]) if i in scores else None
            for i, token in enumerate(self.prompt)
        ]

    def _part(self, text: str, logprobs: Any, ids: Sequence[int]) -> dict[str, Any]:
        part = {
            "index": self.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": None,
            "stop_reason": None,
        }
        if self._run._asked.return_token_ids:
            part["token_ids"] = list(ids)
        return part


def _joined(parts: list[dict[str, Any]], prompt_logprobs: Any) -> dict[str, Any]:
    """One choice of its parts."""
    whole = dict(parts[-1])
    whole["text"] = "".join(part["text"] for part in parts)
    given = [part["logprobs"] for part in parts if part["logprobs"] is not None]
    if given:
        whole["logprobs"] = {
            key: [value for part in given for value in part[key]] for key in given[0]
        }
    if prompt_logprobs is not None:
        whole["prompt_logprobs"] = prompt_logprobs
    return whole
