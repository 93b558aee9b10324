"""A chat reply's text as its client sees it: reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from cotrt.server.reasoning import ReasoningSplitter
from cotrt.server.tool_calls import CallDelta, Delta, ToolCallParser


class ChatText:
    """Text in, OpenAI's deltas out. Whole replies are made of the same deltas.

    Args:
        reasoning: split <think> off.
        thinks_at_once: the prompt has opened <think>.
        tool_style: "hermes", "llama3_json", or None where the request has no tools.
        tool_names: names of the request's tools.
        only_one_call: drop all calls but the first (parallel_tool_calls=false).
    """

    def __init__(
        self,
        *,
        reasoning: bool,
        thinks_at_once: bool = False,
        tool_style: str | None = None,
        tool_names: Collection[str] = (),
        only_one_call: bool = False,
    ) -> None:
        self._splitter = ReasoningSplitter(begins_inside=thinks_at_once) if reasoning else None
        self._parser = None if tool_style is None else ToolCallParser(tool_style, tool_names)
        self._only_one_call = only_one_call

    @property
    def has_calls(self) -> bool:
        return self._parser is not None and self._parser.num_calls > 0

    def append(self, text: str) -> list[dict[str, Any]]:
        """Deltas for new text."""
        thought, content = self._splitter.append(text) if self._splitter else ("", text)
        return self._deltas(thought, self._parse(content))

    def finish(self) -> list[dict[str, Any]]:
        """Deltas for what was held back."""
        thought, content = self._splitter.finish() if self._splitter else ("", "")
        found = self._parse(content)
        if self._parser is not None:
            found += self._parser.finish()
        return self._deltas(thought, found)

    def _parse(self, content: str) -> list[Delta]:
        if not content:
            return []
        return [content] if self._parser is None else self._parser.append(content)

    def _deltas(self, thought: str, found: Iterable[Delta]) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        if thought:
            deltas.append({"reasoning_content": thought})
        for each in found:
            if isinstance(each, str):
                deltas.append({"content": each})
            elif not (self._only_one_call and each.index > 0):
                deltas.append({"tool_calls": [_call(each)]})
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
