"""Calls of user functions, sync or async, and checks of what they return."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import anyio

from cotrt.errors import InvalidRequestError
from cotrt.search.tree import Node


async def call(function: Callable[..., Any], *args: Any) -> Any:
    """The function's value; awaited if it is awaitable. Sync functions run in the loop's thread."""
    value = function(*args)
    return await value if inspect.isawaitable(value) else value


async def call_each(name: str, function: Callable[..., Any], nodes: Sequence[Node]) -> list[Any]:
    """``function(node)`` for every node; those that are async run at once, so as one batch.

    Raises:
        Exception: the function's own, that of the first node in order, with a note that says
            where (Python 3.11 and later). The others are cancelled.
    """
    results: list[Any] = [None] * len(nodes)
    waiting: list[tuple[int, Awaitable[Any]]] = []
    errors: dict[int, BaseException] = {}
    for index, node in enumerate(nodes):
        try:
            value = function(node)
        except Exception as error:
            errors[index] = error
            break
        if inspect.isawaitable(value):
            waiting.append((index, value))
        else:
            results[index] = value
    if errors:
        for _, value in waiting:
            if inspect.iscoroutine(value):
                value.close()
    elif len(waiting) == 1:
        [(index, value)] = waiting
        try:
            results[index] = await value
        except Exception as error:
            errors[index] = error
    elif waiting:
        await _gather(waiting, results, errors)
    if errors:
        first = min(errors)
        _explain(errors[first], name, nodes[first])
        raise errors[first]
    return results


async def _gather(
    waiting: Sequence[tuple[int, Awaitable[Any]]],
    results: list[Any],
    errors: dict[int, BaseException],
) -> None:
    async def one(index: int, value: Awaitable[Any]) -> None:
        try:
            results[index] = await value
        except Exception as error:
            errors[index] = error
            group.cancel_scope.cancel()

    try:
        async with anyio.create_task_group() as group:
            for index, value in waiting:
                group.start_soon(one, index, value)
    finally:
        for _, value in waiting:
            if inspect.iscoroutine(value):
                value.close()  # one that a cancelled scope never let begin; else no effect


def _explain(error: BaseException, name: str, node: Node) -> None:
    if hasattr(error, "add_note"):
        error.add_note(f"raised by {name} on {describe(node)}")


def describe(node: Node) -> str:
    """A node, in a message."""
    text = node.text if len(node.text) <= 40 else node.text[:39] + "…"
    return f"node {node.id} ({text!r})"


def as_score(value: Any, name: str, node: Node) -> float:
    """A score as a finite float.

    Raises:
        InvalidRequestError: it is no number, or NaN or infinite.
    """
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise InvalidRequestError(
            f"{name} gave {value!r} for {describe(node)}: it must return a number"
        ) from None
    if not math.isfinite(number):
        raise InvalidRequestError(
            f"{name} gave {number} for {describe(node)}: a score must be a finite number, or the "
            "ranking would mean nothing"
        )
    return number


def check_int(name: str, value: Any, low: int) -> None:
    """An argument is an int of at least `low`.

    Raises:
        InvalidRequestError: it is not.
    """
    if type(value) is not int or value < low:
        raise InvalidRequestError(f"{name}={value!r}: must be an int of at least {low}")


def check_one_of(name: str, value: Any, allowed: Sequence[Any]) -> None:
    """An argument is one of a few values.

    Raises:
        InvalidRequestError: it is not.
    """
    if value not in allowed:
        known = ", ".join(map(repr, allowed))
        raise InvalidRequestError(f"{name}={value!r}: must be one of {known}")
