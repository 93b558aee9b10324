"""A reply as its reader sees it: the thought, the content and the tool calls in a model's text.

Hermes and Qwen write ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, after some text
or none. Llama 3 writes ``{"name": ..., "parameters": {...}}`` as the beginning of its text, several
joined by semicolons, perhaps after ``<|python_tag|>``. A thought is what stands in a leading
``<think>...</think>``; calls count after it only. What is no call is content, every character.

One parser serves the server and agents, whole texts and streams.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Collection
from dataclasses import dataclass

from cotrt.options.tags import THINK, THINK_END
from cotrt.program.call_scanner import NO_JSON, NO_NAME, CallScanner

CALL, CALL_END = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
TAGS = (THINK, THINK_END, CALL, CALL_END, PYTHON_TAG)

STYLES = ("hermes", "llama3_json", "any")
_LETTERS = string.ascii_letters + string.digits


def new_call_id() -> str:
    """Nine letters and digits: some templates (Mistral's) take no other."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


@dataclass(frozen=True, slots=True)
class Thought:
    """Text of the thought."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """Text that is neither thought nor call; `no_call`: why marked text in it is none."""

    text: str
    no_call: str | None = None


@dataclass(frozen=True, slots=True)
class CallDelta:
    """Part of a tool call.

    Attributes:
        index: which call of the text.
        arguments: text to append to its arguments.
        id, name: in a call's first delta, else None.
    """

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


Event = Thought | Content | CallDelta


class ReplyParser:
    """Text in, in pieces of any size; thought, content and calls out, in order.

    White space around a thought's tags and around calls belongs to neither.

    Args:
        thoughts: a leading ``<think>`` begins a thought.
        opened: the prompt has opened it.
        style: how calls are written: "hermes", "llama3_json", "any" of the two; None: no calls.
        names: tools that there are; None: any. An unmarked call must name one.
        forced: the text is a call and nothing else; of one that is cut nothing is content.
        hidden: tags that are special tokens here: they are read, and no text shows them.

    Attributes:
        num_calls: calls found.
    """

    def __init__(
        self,
        *,
        thoughts: bool = True,
        opened: bool = False,
        style: str | None = None,
        names: Collection[str] | None = None,
        forced: bool = False,
        hidden: Collection[str] = (),
    ) -> None:
        self._style, self._names, self._forced = style, names, forced
        self._hidden = tuple(hidden)
        self._state = ("thought" if opened else "begin") if thoughts else self._first_state()
        self._strip = thoughts and opened
        self._held = ""  # read, and not decided
        self._space = ""  # white space that is shown where text follows
        self._mute = 0  # characters of what is held that were said before: see `prime`
        self._in_tag = False  # after a call whose closing tag is still to come
        self._marked = False  # the call that is being read is
        self._raw = ""  # of the call that is being read, as long as it may be none
        self._scanner = CallScanner()
        self._num_sent = -1  # characters of the arguments that were given out; -1: not begun
        self.num_calls = 0

    @property
    def in_thought(self) -> bool:
        return self._state == "thought"

    @property
    def may_think(self) -> bool:
        """Nothing has come yet, and a thought may."""
        return self._state == "begin"

    def append(self, text: str) -> list[Event]:
        """What is certain now."""
        return self._read(self._held + text, last=False)

    def finish(self) -> list[Event]:
        """What was held back."""
        out = self._read(self._held, last=True)
        if self._state != "thought" and not self.num_calls and self._space:
            self._emit(out, self._space)
        self._space = ""
        return out

    def prime(self, text: str) -> None:
        """Go on after a text that was said before, as if it had been read: it is not shown again.

        A call that it leaves open is given out whole when more of it comes.
        """
        self.append(text)
        self.num_calls, self._num_sent, self._mute = 0, -1, len(self._held)
        self._space = self._raw = ""

    # ---- states -------------------------------------------------------------------------------

    def _first_state(self) -> str:
        return "first" if self._style in ("llama3_json", "any") else "text"

    def _read(self, text: str, *, last: bool) -> list[Event]:
        out: list[Event] = []
        states = {
            "begin": self._read_begin,
            "thought": self._read_thought,
            "first": self._read_first,
            "text": self._read_text,
            "call": self._read_call,
            "after": self._read_after,
        }
        while True:
            before = (self._state, len(text))
            text = states[self._state](text, out, last)
            if (self._state, len(text)) == before or not (text or last):
                break
        self._held = text
        return out

    def _read_begin(self, text: str, out: list[Event], last: bool) -> str:
        body = text.lstrip()
        if body.startswith(THINK):
            self._state, self._strip, self._mute = "thought", True, 0
            return body[len(THINK) :]
        if last or not THINK.startswith(body):
            self._state = self._first_state()
        return text

    def _read_thought(self, text: str, out: list[Event], last: bool) -> str:
        tags = (THINK_END, *(tag for tag in self._hidden if tag != THINK_END))
        before, tag, rest = _first_of(text, tags, last)
        self._emit_spaced(out, before, Thought)
        if tag:
            self._mute = 0
        if tag == THINK_END or (last and not rest):
            self._space = ""
        if tag == THINK_END:
            self._state, self._strip = self._first_state(), True
        return rest

    def _read_first(self, text: str, out: list[Event], last: bool) -> str:
        """A call without marks begins with the text, or there is none."""
        body = text.lstrip()
        gap = text[: len(text) - len(body)]
        if body.startswith(PYTHON_TAG):
            self._begin_call(gap + PYTHON_TAG, marked=False)
            return body[len(PYTHON_TAG) :]
        if body.startswith("{"):
            self._begin_call(gap, marked=False)
            return body
        if last or not PYTHON_TAG.startswith(body):
            self._state = "text"
        return text

    def _read_text(self, text: str, out: list[Event], last: bool) -> str:
        marked = self._style in ("hermes", "any")
        tags = (CALL,) * marked + (CALL_END,) * self._in_tag + self._hidden
        before, tag, rest = _first_of(text, tags, last)
        if marked:
            self._emit_spaced(out, before, Content)
        else:
            self._emit(out, before)
        if tag == CALL and marked:
            self._begin_call(tag, marked=True)
        elif tag:
            self._mute = 0
            self._in_tag = self._in_tag and tag != CALL_END
        return rest

    def _begin_call(self, raw: str, *, marked: bool) -> None:
        self._raw, self._mute = raw[self._mute :], 0
        self._state, self._marked = "call", marked
        self._scanner, self._num_sent = CallScanner(), -1

    def _read_call(self, text: str, out: list[Event], last: bool) -> str:
        scanner = self._scanner
        used = scanner.feed(text)
        taken, text = text[:used], text[used:]
        if self._num_sent < 0:
            self._raw += taken
        error = scanner.error or self._refusal()
        if self._num_sent >= 0 or (error is None and (scanner.is_known or scanner.is_done)):
            self._emit_call(out)
            if scanner.is_done or error is not None or (last and not text):
                self._state, self._in_tag = "after", self._marked
                if not scanner.is_done:
                    self._emit(out, scanner.tail)
            return text
        if error is not None or last:
            self._give_up(out, error or f"{NO_JSON}: it is cut short")
        return text

    def _refusal(self) -> str | None:
        """Why the object is no call, whatever follows, though it may be good JSON."""
        scanner = self._scanner
        if self._num_sent >= 0:
            return None
        if scanner.is_done and scanner.name is None:
            return NO_NAME
        if self._marked or not (scanner.is_done or scanner.is_known):
            return None
        if self._names is not None and scanner.name not in self._names:
            return f"there is no tool {scanner.name!r}"
        if not scanner.has_arguments and (self._names is None or scanner.keys != ["name"]):
            return "it has no arguments"
        return None

    def _emit_call(self, out: list[Event]) -> None:
        """Give out a call's beginning when it is known, then its arguments as they come."""
        arguments = self._scanner.arguments if self._scanner.has_arguments else "{}"
        if self._num_sent < 0:
            out.append(CallDelta(self.num_calls, arguments, new_call_id(), self._scanner.name))
            self.num_calls += 1
            self._space = self._raw = ""
        elif len(arguments) > self._num_sent:
            out.append(CallDelta(self.num_calls - 1, arguments[self._num_sent :]))
        self._num_sent = len(arguments)

    def _read_after(self, text: str, out: list[Event], last: bool) -> str:
        """After a call: its closing tag, or another call."""
        body = text.lstrip() if self._marked else text.lstrip(" \t\r\n;,")
        gap = text[: len(text) - len(body)]
        if body.startswith("{"):
            self._begin_call(gap, marked=self._marked)
            return body
        for tag in (CALL_END, CALL) if self._marked else ():
            if body.startswith(tag):
                self._mute, self._in_tag = 0, False
                self._state = "text"
                return body[len(tag) :] if tag == CALL_END else body
            if tag.startswith(body) and (body or not last):
                # At the end that is a tag which was cut.
                return "" if last else text
        if not body and not last:
            return text
        self._state = "text"
        return text if text.strip() else ""

    def _give_up(self, out: list[Event], reason: str) -> None:
        """No call: what was read is content."""
        self._state = "text"
        raw, self._raw = self._space + self._raw, ""
        self._space = ""
        self._emit(out, raw, reason if self._marked else None)

    # ---- out ----------------------------------------------------------------------------------

    def _emit_spaced(
        self, out: list[Event], text: str, kind: type[Thought] | type[Content]
    ) -> None:
        """Text whose white space at the end is shown only where more follows."""
        text = self._without_said(text)
        body = text.rstrip()
        if not body:
            self._space += text
            return
        shown, self._space = self._space + body, text[len(body) :]
        self._show(out, shown, kind)

    def _emit(self, out: list[Event], text: str, no_call: str | None = None) -> None:
        self._show(out, self._without_said(text), Content, no_call)

    def _without_said(self, text: str) -> str:
        shown = text[self._mute :]
        self._mute = max(0, self._mute - len(text))
        return shown

    def _show(
        self,
        out: list[Event],
        text: str,
        kind: type[Thought] | type[Content],
        no_call: str | None = None,
    ) -> None:
        if self._forced and kind is Content:
            return  # the beginning or the end of a call that was cut
        for tag in self._hidden:
            text = text.replace(tag, "")
        if self._strip:
            text = text.lstrip()
            self._strip = not text
        if no_call is not None:
            out.append(Content(text, no_call))
        elif text:
            out.append(kind(text))


def _first_of(text: str, tags: Collection[str], last: bool) -> tuple[str, str, str]:
    """The text before the first of the tags, that tag or "", and what is left to read."""
    found = min(((at, tag) for tag in tags if (at := text.find(tag)) >= 0), default=None)
    if found is not None:
        at, tag = found
        return text[:at], tag, text[at + len(tag) :]
    held = 0 if last else max((_held_back(text, tag) for tag in tags), default=0)
    return text[: len(text) - held], "", text[len(text) - held :]


def _held_back(text: str, tag: str) -> int:
    """How many characters at the end of `text` may be the beginning of `tag`."""
    for size in range(min(len(tag) - 1, len(text)), 0, -1):
        if tag.startswith(text[-size:]):
            return size
    return 0


def is_opened(prompt: str) -> bool:
    """The prompt ends in an open thought."""
    return prompt.rstrip().endswith(THINK)
