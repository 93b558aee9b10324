"""Reads one JSON object of a tool call while it is still being written."""

from __future__ import annotations

import json

_SPACE = " \t\r\n"
_ARGUMENTS = ("arguments", "parameters")


class CallScanner:
    """Characters in; the name, and the text of the arguments as far as it has come.

        {"name": "get_weather", "arguments": {"city": "Rome"}}
                  └── name ──┘               └─ arguments ──┘

    Attributes:
        name: the call's name, once it is complete.
        has_arguments: the arguments have begun.
        arguments: their text so far, as the model wrote it.
        is_done: the object is complete.
        is_broken: it is no such object.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.has_arguments = False
        self.arguments = ""
        self.is_done = False
        self.is_broken = False
        self._wants = "open"  # then: key, colon, value, inside, after
        self._key = ""
        self._token: list[str] = []
        self._fresh: list[str] = []  # characters of the arguments that came with this feed
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def feed(self, text: str) -> int:
        """Takes characters.

        Returns:
            How many belong to the object; the rest comes after its end.
        """
        used = len(text)
        for index, character in enumerate(text):
            if self.is_done or self.is_broken:
                used = index
                break
            self._take(character)
        if self._fresh:
            self.arguments += "".join(self._fresh)
            self._fresh = []
        return used

    def _take(self, c: str) -> None:
        wants = self._wants
        if wants == "key" and self._in_string:
            self._token.append(c)
            if self._ends_string(c):
                self._key = self._loads("".join(self._token))
                self._wants = "colon"
        elif wants == "inside":
            self._inside(c)
        elif c in _SPACE:
            return
        elif wants == "open":
            self._expect(c, "{", "key")
        elif wants == "key":
            if c == '"':
                self._token, self._in_string = [c], True
            else:
                self._expect(c, "}", "done")
        elif wants == "colon":
            self._expect(c, ":", "value")
        elif wants == "value":
            self._begin_value(c)
        elif c == ",":
            self._wants = "key"
        else:
            self._expect(c, "}", "done")

    def _expect(self, c: str, wanted: str, then: str) -> None:
        if c != wanted:
            self.is_broken = True
        elif then == "done":
            self.is_done = True
        else:
            self._wants = then

    def _begin_value(self, c: str) -> None:
        if c in ",:}]":
            self.is_broken = True
            return
        self._wants, self._token, self._depth = "inside", [], 0
        if self._key in _ARGUMENTS:
            self.has_arguments, self.arguments, self._fresh = True, "", []
        self._inside(c)

    def _inside(self, c: str) -> None:
        if not self._in_string and self._depth == 0 and c in ",}" + _SPACE and self._token:
            self._end_value()  # a number or a word ends before this character
            self._take(c)
            return
        self._token.append(c)
        if self._key in _ARGUMENTS:
            self._fresh.append(c)
        if self._in_string:
            if self._ends_string(c) and self._depth == 0:
                self._end_value()
        elif c == '"':
            self._in_string = True
        elif c in "{[":
            self._depth += 1
        elif c in "}]":
            self._depth -= 1
            if self._depth == 0:
                self._end_value()

    def _ends_string(self, c: str) -> bool:
        if self._escaped:
            self._escaped = False
        elif c == "\\":
            self._escaped = True
        elif c == '"':
            self._in_string = False
            return True
        return False

    def _end_value(self) -> None:
        self._wants = "after"
        text = "".join(self._token)
        if self._key == "name":
            self.name = self._loads(text)
        elif self._key in _ARGUMENTS and text.startswith('"'):
            self.arguments, self._fresh = (
                self._loads(text),
                [],
            )  # arguments that were written as a string

    def _loads(self, text: str) -> str:
        try:
            value = json.loads(text, strict=False)
        except ValueError:
            value = None
        if not isinstance(value, str):
            self.is_broken = True
            return ""
        return value

    @property
    def is_streamable(self) -> bool:
        """The arguments are an object: what has come of them is final."""
        return self.arguments.startswith("{")
