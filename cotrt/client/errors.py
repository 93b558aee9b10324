"""Errors that a server tells of, as the kinds that a local branch would raise."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

from cotrt.client.results import completion_of
from cotrt.errors import (
    BranchBusyError,
    BranchPrunedError,
    CotrtError,
    EngineDeadError,
    InvalidRequestError,
    KVCacheExhaustedError,
    NumericsError,
    PromptTooLongError,
)

_ERRORS: dict[str, type[CotrtError]] = {
    "context_length_exceeded": PromptTooLongError,
    "kv_cache_exhausted": KVCacheExhaustedError,
    "branch_busy": BranchBusyError,
    "branch_pruned": BranchPrunedError,
    "branch_not_found": BranchPrunedError,
    "engine_dead": EngineDeadError,
    "numerics": NumericsError,
}


class ServerUnreachableError(CotrtError, ConnectionError):
    """No server answers there, or the connection broke; the message names the URL."""


@contextmanager
def reaching(url: str) -> Iterator[None]:
    """What goes wrong with a connection is told with the server's URL.

    Raises:
        ServerUnreachableError: in place of what sockets, TLS and HTTP raise.
    """
    try:
        yield
    except ServerUnreachableError:
        raise
    except ConnectionRefusedError as error:
        raise ServerUnreachableError(f"no server listens at {url}: is it running?") from error
    except ssl.SSLError as error:
        raise ServerUnreachableError(
            f"{url} and this program found no TLS that both accept: {error}; for a server without "
            "TLS say http://"
        ) from error
    except (OSError, http.client.HTTPException) as error:
        told = str(error) or type(error).__name__
        raise ServerUnreachableError(f"the connection to {url} failed: {told}") from error


def server_error(status: int, body: bytes) -> CotrtError:
    """The error that the server told of, as the kind that a local branch would raise."""
    try:
        whole = json.loads(body)
        told, output = whole["error"], whole.get("output")
        message, code = str(told["message"]), told.get("code")
    except (ValueError, KeyError, TypeError, AttributeError):
        message, code = body[:200].decode("utf-8", "replace"), None
        output = None
    kind = _ERRORS.get(code or "")
    if kind is None:
        kind = InvalidRequestError if status in (400, 401, 404, 413, 415) else CotrtError
    error = kind(message)
    if isinstance(error, (BranchPrunedError, NumericsError)) and output is not None:
        error.output = completion_of(output)
    return error
