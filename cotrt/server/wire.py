"""Bodies in and out: JSON with limits, JSON replies, and streams that end when the client goes."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import anyio
from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cotrt.server.errors import ApiError, to_api_error
from cotrt.server.options import ServerOptions

logger = logging.getLogger(__name__)

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)
Emit = Callable[[Any], Awaitable[None]]

# A body this long is parsed in a thread: a loop that serves others must not wait for it.
_LARGE_BODY = 1 << 17
_MAX_DEPTH = 64
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class ClientGoneError(Exception):
    """The client closed the connection; nobody reads what would be answered."""


async def read_json(request: Request, options: ServerOptions) -> dict[str, Any]:
    """The body as a JSON object.

    Raises:
        ApiError: too long, too slow, of another type, no JSON, or no object.
        ClientGoneError: the client left while it was sending.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(
            415, f"content-type {kind[:80]!r}: must be application/json", code="unsupported_media"
        )
    limit = options.max_body_bytes
    too_long = ApiError(413, f"the body is longer than {limit} bytes", code="body_too_long")
    given = request.headers.get("content-length", "")
    if given.isdecimal() and int(given[:20]) > limit:
        raise too_long
    body = bytearray()
    try:
        with anyio.fail_after(options.body_timeout_s):
            async for part in request.stream():
                body += part
                if len(body) > limit:
                    raise too_long
    except TimeoutError:
        raise ApiError(
            408, f"the body did not come within {options.body_timeout_s} s", code="body_timeout"
        ) from None
    except ClientDisconnect:
        raise ClientGoneError from None
    if len(body) > _LARGE_BODY:
        return await anyio.to_thread.run_sync(_parse, bytes(body))
    return _parse(bytes(body))


def _parse(body: bytes) -> dict[str, Any]:
    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is no JSON number")

    try:
        value = json.loads(body.decode("utf-8"), parse_constant=refuse)
        if _SURROGATE.search(body):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeError:
        raise ApiError(400, "the body is not valid UTF-8, or holds half a surrogate pair") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}"[:300]) from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be a JSON object, not {type(value).__name__}")
    if _depth_exceeds(value, _MAX_DEPTH):
        raise ApiError(400, f"the body is nested more than {_MAX_DEPTH} deep")
    return value


def _depth_exceeds(value: Any, limit: int) -> bool:
    layer = [value]
    for _ in range(limit):
        deeper: list[Any] = []
        for item in layer:
            inner = item.values() if isinstance(item, dict) else item
            deeper.extend(each for each in inner if isinstance(each, (dict, list)))
        if not deeper:
            return False
        layer = deeper
    return True


async def read_model(request: Request, options: ServerOptions, model: type[M]) -> M:
    """The body, checked.

    Raises:
        ApiError, ClientGoneError: as `read_json`.
        pydantic.ValidationError: a field that is wrong, missing or unknown.
    """
    return model.model_validate(await read_json(request, options))


def encode(value: Any) -> bytes:
    """JSON as bytes; half a surrogate pair, which a model may sample, becomes a question mark."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")


class Reply(Response):
    """A JSON body."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode(content)


def error_reply(error: BaseException) -> Reply:
    """The reply that tells of an error."""
    told = to_api_error(error)
    return Reply(told.body, told.status, headers=told.headers)


async def while_connected(receive: Receive, work: Callable[[], Awaitable[T]]) -> T:
    """Run `work`; a client that goes away cancels it. The body must have been read.

    Raises:
        ClientGoneError: the client went away first.
    """
    gone = False
    result: list[T] = []
    error: Exception | None = None

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(watch)
        try:
            result.append(await work())
        except Exception as caught:
            error = caught
        group.cancel_scope.cancel()
    if error is not None:
        raise error
    if not result:
        assert gone
        raise ClientGoneError
    return result[0]


class EventStream(Response):
    """Server-sent events: one ``data:`` line each, ``[DONE]`` last, an error as an event.

    Args:
        produce: called with `emit`; awaits it with each event's JSON data.
        cleanup: called once when the stream has ended, in whatever way. It must not wait.
        write_timeout_s: a client that leaves its stream unread for so long is dropped.
        done: send ``[DONE]`` at the end.
    """

    def __init__(
        self,
        produce: Callable[[Emit], Awaitable[None]],
        *,
        cleanup: Callable[[], None],
        write_timeout_s: float,
        done: bool = True,
    ) -> None:
        super().__init__(
            status_code=200,
            headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
            media_type="text/event-stream",
        )
        del self.headers["content-length"]
        self._produce = produce
        self._cleanup = cleanup
        self._timeout = write_timeout_s
        self._done = done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write(body: bytes, more: bool = True) -> None:
            with anyio.fail_after(self._timeout):
                await send({"type": "http.response.body", "body": body, "more_body": more})

        async def emit(value: Any) -> None:
            await write(b"data: " + encode(value) + b"\n\n")

        async def work() -> None:
            headers = self.raw_headers
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            try:
                await self._produce(emit)
            except (TimeoutError, OSError):
                raise ClientGoneError from None
            except Exception as error:
                await emit(to_api_error(error).body)
            await write(b"data: [DONE]\n\n" if self._done else b"", more=False)

        try:
            await while_connected(receive, work)
        except (ClientGoneError, TimeoutError, OSError):
            logger.debug("the client of a stream went away")
        finally:
            self._cleanup()
