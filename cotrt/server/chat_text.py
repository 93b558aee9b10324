"""A chat reply's text as its client sees it: reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cotrt.program.reply_parser import CallDelta, Event, ReplyParser, Thought


class ChatText:
    """Text in, OpenAI's deltas out. Whole replies are made of the same deltas.

    Args:
        parser: reads the text.
        only_one_call: drop all calls but the first (parallel_tool_calls=false).
    """

    def __init__(self, parser: ReplyParser, *, only_one_call: bool = False) -> None:
        self._parser = parser
        self._only_one_call = only_one_call

    @property
    def has_calls(self) -> bool:
        return self._parser.num_calls > 0

    def append(self, text: str) -> list[dict[str, Any]]:
        """Deltas for new text."""
        return self._deltas(self._parser.append(text))

    def finish(self) -> list[dict[str, Any]]:
        """Deltas for what was held back."""
        return self._deltas(self._parser.finish())

    def _deltas(self, events: Iterable[Event]) -> list[dict[str, Any]]:
        """One delta for each run of events of one kind."""
        deltas: list[dict[str, Any]] = []
        for event in events:
            if isinstance(event, CallDelta):
                if not (self._only_one_call and event.index > 0):
                    deltas.append({"tool_calls": [_call(event)]})
                continue
            key = "reasoning_content" if isinstance(event, Thought) else "content"
            if not event.text:
                continue
            if deltas and key in deltas[-1]:
                deltas[-1][key] += event.text
            else:
                deltas.append({key: event.text})
        return deltas


def _call(delta: CallDelta) -> dict[str, Any]:
    call: dict[str, Any] = {"index": delta.index}
    if delta.id is not None:
        call.update(id=delta.id, type="function")
        call["function"] = {"name": delta.name, "arguments": delta.arguments}
    else:
        call["function"] = {"arguments": delta.arguments}
    return call


def message_of(deltas: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The whole message that deltas add up to."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        content.append(delta.get("content") or "")
        reasoning.append(delta.get("reasoning_content") or "")
        for part in delta.get("tool_calls", ()):
            if "id" in part:
                calls.append(
                    {"id": part["id"], "type": "function", "function": dict(part["function"])}
                )
            else:
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    text = "".join(content)
    message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None}
    if any(reasoning):
        message["reasoning_content"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    return message
