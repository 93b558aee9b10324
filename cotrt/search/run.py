"""Searches from sync code."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

from cotrt.errors import InvalidRequestError

T = TypeVar("T")


def run(
    fn: Callable[..., Awaitable[T]], /, *args: object, backend: str = "asyncio", **kwargs: object
) -> T:
    """Run an async function, a search for one, and wait for what it returns.

    Args:
        fn: an async function.
        *args: its arguments.
        backend: "asyncio" or "trio".
        **kwargs: its keyword arguments.

    Raises:
        InvalidRequestError: called inside a running event loop, where ``await fn(...)`` is right.
    """
    from cotrt.engine.promise import in_running_loop

    if in_running_loop():
        name = getattr(fn, "__name__", "fn")
        raise InvalidRequestError(
            f"cotrt.run inside a running event loop would stop the loop: use await {name}(...)"
        )
    return anyio.run(functools.partial(fn, *args, **kwargs), backend=backend)
