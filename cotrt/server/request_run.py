"""What both OpenAI routes do with a request under way: answer it whole or as a stream, count."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from cotrt.engine.state import GenerationState
from cotrt.server.admission import Ticket
from cotrt.server.errors import blaming
from cotrt.server.openai_fields import OpenAIFields
from cotrt.server.service import Service
from cotrt.server.wire import Emit, EventStream, Reply, while_connected

Send = Callable[..., Awaitable[None]]


class RequestRun(Protocol):
    """One request whose outputs have been started."""

    def cleanup(self) -> None:
        """Stop what still runs, and count."""

    async def whole(self) -> dict[str, Any]:
        """The reply, once every output has ended."""

    async def stream(self, emit: Emit) -> None:
        """Emit the reply's chunks as they come."""


async def respond(
    request: Request, service: Service, run: RequestRun, ticket: Ticket, asked: OpenAIFields
) -> Response:
    """The answer; `run` is cleaned up and `ticket` released when it has ended, however it does."""

    async def whole() -> dict[str, Any]:
        with blaming(asked.names):
            return await run.whole()

    async def stream(emit: Emit) -> None:
        with blaming(asked.names):
            await run.stream(emit)

    def cleanup() -> None:
        run.cleanup()
        ticket.release()

    if asked.stream:
        timeout = service.options.write_timeout_s
        return EventStream(stream, cleanup=cleanup, write_timeout_s=timeout)
    try:
        return Reply(await while_connected(request.receive, whole))
    finally:
        cleanup()


def chunk_sender(
    emit: Emit, head: dict[str, Any], asked: OpenAIFields, usage: Callable[[], dict[str, Any]]
) -> Send:
    """``send(choice, **more)`` that emits one chunk, with usage where it was asked for.

    ``send(None)`` is the last chunk: it has no choice, and the usage.
    """

    async def send(choice: dict[str, Any] | None, **more: Any) -> None:
        event = {**head, "choices": [] if choice is None else [choice], **more}
        if asked.wants_usage_always:
            event["usage"] = usage()
        elif asked.wants_usage:
            event["usage"] = None if choice is not None else usage()
        await emit(event)

    return send


def usage_of(
    states: Sequence[GenerationState], *, prompt_tokens: int, outputs_a_prompt: int
) -> dict[str, Any]:
    """Counts in OpenAI's shape; every sampled token counts, the stop's included.

    The prompt tokens whose KV was there are counted once for the outputs of a prompt.
    """
    sampled = sum(
        len(state.tokens) if state.promise.done else state.seq.length - state.start
        for state in states
    )
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": prompt_tokens + sampled,
        "prompt_tokens_details": {
            "cached_tokens": sum(state.num_cached for state in states[::outputs_a_prompt])
        },
    }
