"""The tool calls in a whole text of a model, and what else it says: for agents."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from cotrt.program.call_scanner import NO_JSON
from cotrt.program.reply_parser import Content, ReplyParser, Thought


@dataclass(frozen=True)
class ToolCall:
    """One call.

    Attributes:
        name: of the tool; "" where it could not be read.
        arguments: by name.
        error: why the call could not be read, or None.
    """

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole reply.

    Attributes:
        thought: what was thought.
        content: what was said.
        calls: in order; those that cannot be read have an `error`.
    """

    thought: str
    content: str
    calls: list[ToolCall]


def read_reply(text: str, *, opened: bool = False, hidden: Collection[str] = ()) -> Reply:
    """A whole text, its calls written in any of the styles.

    Args:
        text: of the model.
        opened: the prompt has opened a thought.
        hidden: as `ReplyParser`'s.
    """
    parser = ReplyParser(opened=opened, style="any", hidden=hidden)
    thought: list[str] = []
    content: list[str] = []
    calls: list[ToolCall | list[str]] = []
    for event in parser.append(text) + parser.finish():
        if isinstance(event, Thought):
            thought.append(event.text)
        elif isinstance(event, Content):
            content.append(event.text)
            if event.no_call is not None:
                calls.append(ToolCall("", error=event.no_call))
        elif event.name is not None:
            parts = [event.name, event.arguments]
            calls.append(parts)
        else:
            last = calls[-1]
            assert isinstance(last, list)
            last.append(event.arguments)
    made = [each if isinstance(each, ToolCall) else _made(*each) for each in calls]
    return Reply("".join(thought), "".join(content), made)


def _made(name: str, *arguments: str) -> ToolCall:
    try:
        value = json.loads("".join(arguments), strict=False)
    except (ValueError, RecursionError) as error:
        return ToolCall(name, error=f"{NO_JSON}: {error}")
    return ToolCall(name, value)


def parse_tool_calls(text: str) -> list[ToolCall]:
    """The calls in a turn's text, in order; none where the text is an answer.

    Read are Hermes' and Qwen's ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, any
    number of them, and Llama 3's ``{"name": ..., "parameters": {...}}`` where the text begins with
    it, several with ``;`` between them. What stands in a leading ``<think>...</think>`` is no
    call. A call that is marked but cannot be read has an `error`.
    """
    return read_reply(text).calls
