"""`POST /v1/chat/completions`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from cotrt.options.sampling import SamplingParams
from cotrt.program.handle import Generation
from cotrt.server.chat_request import ChatRequest
from cotrt.server.chat_text import ChatText, message_of
from cotrt.server.outputs import Piece, finish_reason, read_pieces
from cotrt.server.reasoning import OPEN
from cotrt.server.request_run import chunk_sender, respond, usage_of
from cotrt.server.service import Service
from cotrt.server.streaming import each_at_once
from cotrt.server.token_logprobs import SampledTexts
from cotrt.server.wire import Emit, read_model


async def create_chat_completion(request: Request, service: Service) -> Response:
    """Reply to a conversation, ``n`` times; with ``branch_id`` on that branch."""
    asked = await read_model(request, service.options, ChatRequest)
    service.check_model(asked.model)
    asked.check()
    params = await service.params_of(asked.sampling(service.options, service.tool_style))
    rendering = asked.rendering()
    ticket = service.admission.take(asked.check_outputs(1, service.options))
    try:
        if asked.branch_id is not None:
            owner = request.scope["state"]["owner"]
            branch = service.branches.find(asked.branch_id, owner)
            generations: Sequence[Generation] = [await service.reply(branch, rendering, params)]
            prompt = branch.branch.token_ids[: generations[0]._state.start]

            def cancel() -> None:
                generations[0].cancel()
        else:
            prompt = await service.encode(service.runtime.encode_chat, **rendering)
            submission = service.start([prompt], params, None)
            generations, cancel = submission, submission.cancel
        run = _Run(service, asked, params, prompt, generations, cancel)
    except BaseException:
        ticket.release()
        raise

    return await respond(request, service, run, ticket, stream=asked.stream)


class _Run:
    """One request under way."""

    def __init__(
        self,
        service: Service,
        asked: ChatRequest,
        params: SamplingParams,
        prompt: list[int],
        generations: Sequence[Generation],
        cancel: Callable[[], None],
    ) -> None:
        self._service = service
        self._asked = asked
        self._params = params
        self._prompt = prompt
        self._generations = generations
        self._cancel = cancel
        self._states = [generation._state for generation in generations]
        self._head = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": asked.model or service.names[0],
        }
        if asked.branch_id is not None:
            self._head["branch_id"] = asked.branch_id

    def cleanup(self) -> None:
        """Stop what still runs, and count."""
        self._cancel()
        self._service.metrics.observe(self._states)

    def _text(self) -> ChatText:
        asked, options = self._asked, self._service.options
        names = asked.tool_names
        tail = ""
        if options.reasoning_parser == "think":
            tail = self._service.runtime.decode(self._prompt[-8:]).rstrip()
        return ChatText(
            reasoning=options.reasoning_parser == "think",
            thinks_at_once=tail.endswith(OPEN),
            tool_style=self._service.tool_style if names else None,
            tool_names=names,
            only_one_call=not asked.parallel_tool_calls,
        )

    async def whole(self) -> dict[str, Any]:
        choices = []
        for index, generation in enumerate(self._generations):
            output, state = await generation, self._states[index]
            text = self._text()
            deltas = text.append(output.text) + text.finish()
            choice: dict[str, Any] = {
                "index": index,
                "message": {"refusal": None, **message_of(deltas)},
                "logprobs": None,
                **self._end(output.finish_reason, output.stop_reason, text),
            }
            if self._asked.logprobs:
                scores = [
                    self._service.runtime.logprob_dict(i, s)
                    for i, s in zip(state.tokens, state.scores)
                ]
                piece = Piece(output.text, output.token_ids, scores)
                choice["logprobs"] = self._logprobs(self._texts(index), [piece])
            if self._asked.return_token_ids:
                choice["token_ids"] = list(output.token_ids)
            choices.append(choice)
        reply = {**self._head, "object": "chat.completion", "choices": choices}
        if self._asked.return_token_ids:
            reply["prompt_token_ids"] = self._prompt
        return {**reply, "usage": self._usage()}

    async def stream(self, emit: Emit) -> None:
        asked = self._asked
        head = {**self._head, "object": "chat.completion.chunk"}
        send = chunk_sender(emit, head, asked, self._usage)

        async def one(index: int) -> None:
            text, texts = self._text(), self._texts(index)
            pending: list[Piece] = []

            async def send_delta(delta: dict[str, Any], end: dict[str, Any]) -> None:
                choice = {"index": index, "delta": delta, "logprobs": None, **end}
                if asked.logprobs and pending:
                    choice["logprobs"] = self._logprobs(texts, pending)
                if asked.return_token_ids:
                    choice["token_ids"] = [i for piece in pending for i in piece.token_ids]
                pending.clear()
                await send(choice)

            going: dict[str, Any] = {"finish_reason": None}
            first = {"index": index, "delta": {"role": "assistant", "content": ""}}
            more = {"prompt_token_ids": self._prompt} if asked.return_token_ids else {}
            await send({**first, "logprobs": None, **going}, **more)
            async for piece in read_pieces(self._generations[index]):
                if piece.token_ids:
                    pending.append(piece)
                for delta in text.append(piece.text) if piece.text else ():
                    await send_delta(delta, going)
                if piece.finish_reason is not None:
                    for delta in text.finish():
                        await send_delta(delta, going)
                    await send_delta({}, self._end(piece.finish_reason, piece.stop_reason, text))

        await each_at_once(one, len(self._generations))
        if asked.wants_usage:
            await send(None)

    def _end(self, reason: str | None, stop: int | str | None, text: ChatText) -> dict[str, Any]:
        shown = finish_reason(reason)
        return {
            "finish_reason": "tool_calls" if shown == "stop" and text.has_calls else shown,
            "stop_reason": stop,
        }

    def _texts(self, index: int) -> SampledTexts:
        return SampledTexts(self._service.runtime.tokenizer, self._states[index])

    def _logprobs(self, texts: SampledTexts, pieces: Sequence[Piece]) -> dict[str, Any]:
        ids = [i for piece in pieces for i in piece.token_ids]
        scores = [each for piece in pieces for each in piece.scores]
        return texts.chat_logprobs(ids, scores, self._asked.top_logprobs or 0)

    def _usage(self) -> dict[str, Any]:
        states = self._states
        return usage_of(states, prompt_tokens=len(self._prompt), outputs_a_prompt=len(states))
