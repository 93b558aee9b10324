"""`POST /v1/chat/completions`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response

from cotrt.options.sampling import SamplingParams
from cotrt.options.tags import THINK, THINK_END
from cotrt.program.handle import Generation
from cotrt.program.reply_parser import CALL, CALL_END, PYTHON_TAG, ReplyParser
from cotrt.server.chat_request import ChatRequest
from cotrt.server.chat_text import ChatText, message_of
from cotrt.server.errors import blaming
from cotrt.server.outputs import Piece, finish_reason, read_pieces
from cotrt.server.request_run import chunk_sender, respond, usage_of
from cotrt.server.service import Service
from cotrt.server.streaming import each_at_once
from cotrt.server.thoughts import new_reader
from cotrt.server.token_logprobs import SampledTexts
from cotrt.server.wire import Emit, read_model


async def create_chat_completion(request: Request, service: Service) -> Response:
    """Reply to a conversation, ``n`` times; with ``branch_id`` on that branch."""
    asked = await read_model(request, service.options, ChatRequest)
    service.check_model(asked.model)
    asked.check()
    fields = asked.sampling(service.options, service.tool_style, service.added_tokens)
    rendering = asked.rendering()
    with blaming(asked.names):
        params = await service.params_of(fields)
        ticket = service.admission.take(asked.check_outputs(1, service.options))
        try:
            text, prompt = await service.encode(service.runtime.render_chat, **rendering)
            reader = _Reader(service, asked, text, params)
            thought = reader.thought_before_grammar()
            if thought is not None and params.structured_outputs is not None:
                wanted = params.structured_outputs.replace(thought=thought)
                params = await service.params_of({**fields, "structured_outputs": wanted})
            if asked.branch_id is not None:
                owner = request.scope["state"]["owner"]
                branch = service.branches.find(asked.branch_id, owner)
                generations: Sequence[Generation] = [await service.reply(branch, rendering, params)]
                prompt = branch.branch.token_ids[: generations[0]._state.start]

                def cancel() -> None:
                    generations[0].cancel()
            else:
                submission = service.start([prompt], params, None)
                generations, cancel = submission, submission.cancel
            run = _Run(service, asked, reader, prompt, generations, cancel)
        except BaseException:
            ticket.release()
            raise

    return await respond(request, service, run, ticket, asked)


class _Reader:
    """How the replies to one request are read.

    Attributes:
        tags: special tokens that the text has to show for it.
    """

    def __init__(
        self, service: Service, asked: ChatRequest, prompt: str, params: SamplingParams
    ) -> None:
        self._service, self._asked = service, asked
        self._prompt, self._params = prompt, params
        names = asked.tool_names
        tags = (THINK, THINK_END) * service.thoughts.are_read
        if names and service.tool_style is not None:
            tags += (CALL, CALL_END, PYTHON_TAG)
        tokenizer = service.runtime.tokenizer
        self.tags: frozenset[str] = frozenset()
        if params.skip_special_tokens and tokenizer is not None:
            self.tags = tokenizer.hidden(tags)
        self._continued = None
        if asked.continue_final_message:
            self._continued = asked.messages[-1].model_dump()

    def parser(self) -> ReplyParser:
        """A parser at the beginning of a reply."""
        service, asked = self._service, self._asked
        names = asked.tool_names
        return new_reader(
            self._prompt,
            self._continued,
            thoughts=service.thoughts.are_read,
            style=service.tool_style if names else None,
            names=names,
            forced=asked.forces_call,
            hidden=self.tags,
        )

    def text(self) -> ChatText:
        """What makes deltas of a reply's text."""
        return ChatText(self.parser(), only_one_call=not self._asked.parallel_tool_calls)

    def thought_before_grammar(self) -> Literal["open", "optional"] | None:
        """The thought that may come before the request's grammar, if it has one."""
        wanted = self._params.structured_outputs
        if wanted is None or wanted.thought is not None:
            return None
        return self._service.thoughts.before_grammar(
            self._prompt, self.parser(), is_off=self._asked.wants_no_thought
        )


class _Run:
    """One request under way."""

    def __init__(
        self,
        service: Service,
        asked: ChatRequest,
        reader: _Reader,
        prompt: list[int],
        generations: Sequence[Generation],
        cancel: Callable[[], None],
    ) -> None:
        self._service = service
        self._asked = asked
        self._reader = reader
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

    async def whole(self) -> dict[str, Any]:
        choices = []
        for index, generation in enumerate(self._generations):
            output, state = await generation, self._states[index]
            text = self._reader.text()
            shown = output.text
            if self._reader.tags:
                stream = self._service.runtime.stream_text(state, self._reader.tags)
                shown = stream.append(state.tokens, True)
            deltas = text.append(shown) + text.finish()
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
            text, texts = self._reader.text(), self._texts(index)
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
            async for piece in read_pieces(self._generations[index], self._reader.tags):
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
