"""Finds tool calls in a model's text while it is being written.

Hermes and Qwen write ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, after some text
or none. Llama 3 writes ``{"name": ..., "parameters": {...}}`` as its whole text, several joined by
semicolons, perhaps after ``<|python_tag|>``. What is no such call stays text.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from dataclasses import dataclass

from cotrt.server.call_scanner import CallScanner
from cotrt.server.reasoning import held_back

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"


@dataclass(frozen=True, slots=True)
class CallDelta:
    """Part of a tool call.

    Attributes:
        index: which call of the text.
        id, name: in a call's first delta, else None.
        arguments: text to append to its arguments.
    """

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


Delta = str | CallDelta


class ToolCallParser:
    """Text in; text and parts of calls out, in order.

    Args:
        style: "hermes" or "llama3_json".
        names: names of the request's tools.
    """

    def __init__(self, style: str, names: Collection[str]) -> None:
        self._style = style
        self._names = names
        self._state = "start" if style == "llama3_json" else "text"
        self._held = ""
        self._raw = ""  # of the call that is being read
        self._scanner = CallScanner()
        self._num_sent = -1  # characters of the arguments that were given out; -1: not begun
        self.num_calls = 0

    def append(self, text: str) -> list[Delta]:
        """What is certain now."""
        return self._take(self._held + text, last=False)

    def finish(self) -> list[Delta]:
        """What was held back."""
        return self._take(self._held, last=True)

    def _take(self, text: str, *, last: bool) -> list[Delta]:
        self._held = ""
        out: list[Delta] = []
        while True:
            state = self._state
            if state == "call":
                text = self._read_call(text, out, last)
            elif state == "start":
                text = self._read_start(text, out, last)
            elif state == "plain":
                _add(out, text)
                return out
            elif self._style == "hermes":
                text = self._read_text(text, out, last)
            else:
                text = self._read_between(text, out, last)
            if self._state == state or not (text or last):
                break
        return out

    def _read_text(self, text: str, out: list[Delta], last: bool) -> str:
        """Up to an opening tag. White space before a tag, and between calls, is dropped."""
        before, tag, rest = text.partition(_OPEN)
        if tag:
            _add(out, before.rstrip())
            self._begin_call(tag)
            return rest
        if last:
            if not self.num_calls or text.strip():
                _add(out, text)
            return ""
        keep = len(text) - held_back(text, _OPEN)
        keep = len(text[:keep].rstrip())
        self._held = text[keep:]
        _add(out, text[:keep])
        return ""

    def _read_start(self, text: str, out: list[Delta], last: bool) -> str:
        """Llama: a call begins with the text, or there is none."""
        body = text.lstrip()
        if not last and (not body or (_PYTHON_TAG.startswith(body) and body != _PYTHON_TAG)):
            self._held = text
            return ""
        if body.startswith(_PYTHON_TAG):
            self._begin_call(text[: len(text) - len(body)] + _PYTHON_TAG)
            return body[len(_PYTHON_TAG) :]
        if body.startswith("{"):
            self._begin_call(text[: len(text) - len(body)])
            return body
        self._state = "plain"
        return text

    def _read_between(self, text: str, out: list[Delta], last: bool) -> str:
        """Llama: after a call another may follow."""
        body = text.lstrip(" \t\r\n;,")
        if body.startswith("{"):
            self._begin_call("")
            return body
        if body:
            self._state = "plain"
            return text
        self._held = "" if last else text
        return ""

    def _begin_call(self, raw: str) -> None:
        self._state, self._raw = "call", raw
        self._scanner, self._num_sent = CallScanner(), -1

    def _read_call(self, text: str, out: list[Delta], last: bool) -> str:
        scanner = self._scanner
        if not scanner.is_done:
            used = scanner.feed(text)
            self._raw += text[:used]
            text = text[used:]
            self._emit(out)
        if scanner.is_broken and self._num_sent < 0:
            return self._give_up(text, out)
        if scanner.is_done or scanner.is_broken:
            return self._end_call(text, out, last)
        if last and self._num_sent < 0:
            return self._give_up(text, out)
        return ""

    def _emit(self, out: list[Delta]) -> None:
        """Give out a call's beginning when its name is known, then its arguments as they come."""
        scanner = self._scanner
        if scanner.name is None or scanner.is_broken:
            return
        if self._style != "hermes" and scanner.name not in self._names:
            scanner.is_broken = True
            return
        complete = scanner.is_done
        if not (scanner.has_arguments or (complete and self._style == "hermes")):
            scanner.is_broken = complete
            return
        if not (complete or scanner.is_streamable):
            return
        arguments = scanner.arguments if scanner.has_arguments else "{}"
        if self._num_sent < 0:
            call_id = f"call_{secrets.token_hex(12)}"
            out.append(CallDelta(self.num_calls, arguments, call_id, scanner.name))
            self.num_calls += 1
        elif len(arguments) > self._num_sent:
            out.append(CallDelta(self.num_calls - 1, arguments[self._num_sent :]))
        self._num_sent = len(arguments)

    def _end_call(self, text: str, out: list[Delta], last: bool) -> str:
        if self._style != "hermes":
            self._state = "between"
            return text
        _, tag, rest = text.partition(_CLOSE)
        if tag:
            self._state = "text"
            return rest.lstrip() if not rest.strip() else rest
        if not last:
            self._held = text
        return ""

    def _give_up(self, text: str, out: list[Delta]) -> str:
        """No call: what was read is text."""
        self._state = "plain" if self._style != "hermes" else "text"
        _add(out, self._raw)
        return text


def _add(out: list[Delta], text: str) -> None:
    if text:
        if out and isinstance(out[-1], str):
            out[-1] += text
        else:
            out.append(text)
