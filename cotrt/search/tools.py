"""Tools: functions that a model may call, run with a timeout, their failures as text."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import anyio
import anyio.to_thread

from cotrt.errors import InvalidRequestError
from cotrt.search.tool_calls import ToolCall

Tools = Mapping[str, Callable[..., Any]] | Sequence[Callable[..., Any]]


def as_tools(tools: Any) -> dict[str, Callable[..., Any]]:
    """Tools by name.

    Args:
        tools: functions, each known by its ``__name__``, or functions by name.

    Raises:
        InvalidRequestError: something that is not callable, or two of one name.
    """
    if isinstance(tools, Mapping):
        named = dict(tools)
    elif isinstance(tools, Sequence) and not isinstance(tools, (str, bytes)):
        named = {}
        for tool in tools:
            name = getattr(tool, "__name__", type(tool).__name__)
            if name in named:
                raise InvalidRequestError(f"two tools are named {name!r}: give a dict of names")
            named[name] = tool
    else:
        raise InvalidRequestError(f"tools={tools!r}: must be functions, or a dict of them by name")
    for name, tool in named.items():
        if not isinstance(name, str) or not callable(tool):
            raise InvalidRequestError(f"tool {name!r} is {tool!r}: must be a function")
    return named


def tool_schema(tool: Callable[..., Any], name: str | None = None) -> dict[str, Any]:
    """A tool's definition as chat templates expect it: from its signature and docstring."""
    from pydantic import TypeAdapter

    properties: dict[str, Any] = {}
    required: list[str] = []
    signature = inspect.signature(tool, eval_str=True)
    for key, parameter in signature.parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        given = parameter.annotation
        properties[key] = {} if given is parameter.empty else TypeAdapter(given).json_schema()
        if parameter.default is parameter.empty:
            required.append(key)
    return {
        "type": "function",
        "function": {
            "name": name or getattr(tool, "__name__", type(tool).__name__),
            "description": (inspect.getdoc(tool) or "").split("\n\n")[0].replace("\n", " "),
            "parameters": {"type": "object", "properties": properties, "required": required},
        },
    }


async def run_tool(
    tools: Mapping[str, Callable[..., Any]], call: ToolCall, timeout: float | None
) -> str:
    """What the model is told: the tool's answer, or what went wrong, as JSON.

    Async tools run in the loop; sync ones in a worker thread, which a timeout leaves behind.
    """
    if call.error is not None:
        return _error(call.error)
    if call.name not in tools:
        return _error(f"there is no tool {call.name!r}; there are: {', '.join(sorted(tools))}")
    tool = functools.partial(tools[call.name], **call.arguments)
    try:
        with anyio.fail_after(timeout):
            if _is_async(tools[call.name]):
                value = await tool()
            else:
                value = await anyio.to_thread.run_sync(tool, abandon_on_cancel=True)
                if inspect.isawaitable(value):
                    value = await value
    except TimeoutError:
        return _error(f"{call.name} did not answer within {timeout} s")
    except Exception as error:
        return _error(f"{type(error).__name__}: {error}")
    return value if isinstance(value, str) else _json(value)


def _is_async(tool: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(tool) or inspect.iscoroutinefunction(
        getattr(tool, "__call__", None)  # noqa: B004
    )


def _error(message: str) -> str:
    return json.dumps({"error": message}, ensure_ascii=False)


def _json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(value)
