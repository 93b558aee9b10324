"""Errors as OpenAI's clients expect them: a status, and ``{"error": {...}}``."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import CancelledError
from typing import Any

from pydantic import ValidationError

from cotrt.errors import (
    BranchBusyError,
    BranchPrunedError,
    EngineDeadError,
    InvalidRequestError,
    KVCacheExhaustedError,
    NumericsError,
    PromptTooLongError,
)

logger = logging.getLogger(__name__)

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}


# Fields of OpenAI's that ask for what this server does not do.
NOT_SERVED = frozenset(
    (
        "audio",
        "function_call",
        "functions",
        "moderation",
        "suffix",
        "verbosity",
        "web_search_options",
    )
)
_TYPES = ("str", "int", "float", "bool", "dict", "list", "none")
_FIELD = re.compile(rf"(?!(?:{'|'.join(_TYPES)})$)[a-z_][a-z0-9_]*$")


class ApiError(Exception):
    """What a client is told.

    Attributes:
        status: of the HTTP response.
        message: what was wrong, the value, the limit, what to change.
        param: the field that was wrong, or None.
        code: a word for programs, or None.
        headers: further headers of the response.
        output: as JSON data, what a generate had made before the error; or None.
    """

    output: dict[str, Any] | None = None

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The error as JSON data."""
        default = "invalid_request_error" if self.status < 500 else "server_error"
        kind = _KINDS.get(self.status, default)
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error} if self.output is None else {"error": error, "output": self.output}


def to_api_error(error: BaseException) -> ApiError:
    """The status and message for any exception; one that is our bug is logged."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ValidationError):
        return _of_validation(error)
    if isinstance(error, InvalidRequestError):
        code = None
        if isinstance(error, PromptTooLongError):
            code = "context_length_exceeded"
        elif isinstance(error, KVCacheExhaustedError):
            code = "kv_cache_exhausted"
        return ApiError(400, str(error), param=error.field, code=code)
    if isinstance(error, BranchBusyError):
        return ApiError(409, str(error), code="branch_busy")
    if isinstance(error, BranchPrunedError):
        return ApiError(409, str(error), code="branch_pruned")
    if isinstance(error, EngineDeadError):
        return ApiError(503, str(error), code="engine_dead")
    if isinstance(error, NumericsError):
        return ApiError(500, str(error), code="numerics")
    if isinstance(error, CancelledError):
        return ApiError(503, "the work was stopped before it was done", code="shutting_down")
    logger.error("a request failed", exc_info=error)
    return ApiError(500, f"{type(error).__name__}: the request failed inside the server")


@contextlib.contextmanager
def blaming(names: Mapping[str, str]) -> Iterator[None]:
    """Let errors of the client's name the field of its own request that is to blame.

    Args:
        names: the request's own names for fields that are called otherwise inside; "" is for what
            blames none: the field that has what cannot be rendered, encoded or held.
    """
    try:
        yield
    except (InvalidRequestError, ValidationError) as error:
        told = to_api_error(error)
        inner = told.param or ""
        told.param = names.get(inner, told.param)
        if inner and told.message.startswith(f"{inner}:"):
            told.message = f"{told.param}{told.message[len(inner) :]}"
        raise told from error


def _of_validation(error: ValidationError) -> ApiError:
    """The first wrong field, by name; a field of several types gets all that was expected."""
    found = error.errors(include_url=False, include_context=False)
    first = found[0]
    param = str(first["loc"][0]) if first["loc"] else _first_word(first["msg"])
    if first["type"] == "extra_forbidden":
        param = _path(first["loc"])
        what = "not in this version" if param in NOT_SERVED else "unknown field"
        message = f"{param}: {what}; leave it out"
    else:
        same = [e for e in found if e["loc"][:1] == first["loc"][:1]]
        texts = list(dict.fromkeys(e["msg"].removeprefix("Value error, ") for e in same))
        where = _path(first["loc"]) if first["type"] == "value_error" else param
        message = f"{where}: " * bool(first["loc"]) + "; or: ".join(texts[:4])
        if first["type"] != "missing" and first["loc"]:
            message += f" (got {_short(first.get('input'))})"
    return ApiError(400, message, param=param)


def _first_word(message: str) -> str | None:
    """What is said of several fields together begins with the one to change."""
    found = re.match(r"(?:Value error, )?([a-z_]+)\b", message)
    return None if found is None else found[1]


def _path(loc: tuple[int | str, ...]) -> str:
    """``messages[0].content`` for a field inside of others; names of types are no part of it."""
    last = len(loc) - 1
    kept = [p for i, p in enumerate(loc) if i in (0, last) or isinstance(p, int) or _FIELD.match(p)]
    return "".join(f"[{i}]" if isinstance(i, int) else f".{i}" for i in kept).lstrip(".")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
