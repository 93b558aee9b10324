"""Reads one JSON object of a tool call while it is still being written."""

from __future__ import annotations

import json

_SPACE = " \t\r\n"
_ARGUMENTS = ("arguments", "parameters")
NO_JSON = "the tool call is not valid JSON"
NO_NAME = 'the tool call needs a "name" that is a string'
NO_OBJECT = '"arguments" must be an object'


class CallScanner:
    """Characters in; the name, and the text of the arguments as far as it has come.

        {"name": "get_weather", "arguments": {"city": "Rome"}}
                  └── name ──┘               └─ arguments ──┘

    Of a key that is written twice the first value counts. Arguments may be an object, a string
    that holds one, or nothing: ``null`` and ``""`` are ``{}``.

    Attributes:
        name: the call's name, once it is complete.
        keys: keys of the object that are complete.
        has_arguments: their value is known to be an object: what has come of it is final.
        arguments: their text so far, as the model wrote it.
        tail: what came after them once the call was known.
        is_done: the object is complete.
        error: why it is no such object, else None.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.keys: list[str] = []
        self.has_arguments = False
        self.arguments = ""
        self.tail = ""
        self.is_done = False
        self.error: str | None = None
        self._wants = "open"  # then: key, colon, value, inside, after
        self._key = ""
        self._takes = ""  # "name" or "arguments" where the value is one of the two
        self._token: list[str] = []
        self._fresh: list[str] = []  # characters of the arguments that came with this feed
        self._depth = 0
        self._in_string = False
        self._escaped = False

    @property
    def is_known(self) -> bool:
        """It is a call, whatever comes: name and arguments have begun to be one."""
        return self.name is not None and self.has_arguments

    def feed(self, text: str) -> int:
        """Takes characters, up to one that decides something.

        That is the object's end, a wrong character, or the one that makes it known: so what is
        found does not depend on how the text is cut.

        Returns:
            How many were taken.
        """
        used, known = 0, self.is_known
        tail: list[str] = []
        for character in text:
            if self.is_done or self.error is not None or self.is_known != known:
                break
            after = known and not (self._wants == "inside" and self._takes == "arguments")
            self._take(character)
            if self.error is None:
                used += 1
                if after:
                    tail.append(character)
        self.arguments += "".join(self._fresh)
        self._fresh = []
        self.tail += "".join(tail)
        return used

    def _take(self, c: str) -> None:
        wants = self._wants
        if wants == "key" and self._in_string:
            self._token.append(c)
            if self._ends_string(c):
                self._key = self._loads("".join(self._token), NO_JSON)
                self.keys.append(self._key)
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
            self.error = NO_JSON
        elif then == "done":
            self.is_done = True
        else:
            self._wants = then

    def _begin_value(self, c: str) -> None:
        if c in ",:}]":
            self.error = NO_JSON
            return
        self._wants, self._token, self._depth = "inside", [], 0
        if self._key == "name" and self.name is None:
            self._takes = "name"
        elif self._key in _ARGUMENTS and not self.has_arguments:
            self._takes = "arguments"
            if c == "{":
                self.has_arguments = True
            elif c not in '"n':
                self.error = NO_OBJECT
                return
        else:
            self._takes = ""
        self._inside(c)

    def _inside(self, c: str) -> None:
        if not self._in_string and self._depth == 0 and c in ",}" + _SPACE and self._token:
            self._end_value()  # a number or a word ends before this character
            if self.error is None:
                self._take(c)
            return
        if self._takes != "arguments" or not self.has_arguments:
            self._token.append(c)
        else:
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
        if self._takes == "name":
            self.name = self._loads("".join(self._token), NO_NAME)
        elif self._takes == "arguments" and not self.has_arguments:
            self._end_written("".join(self._token))

    def _end_written(self, text: str) -> None:
        """Arguments that are no object themselves: null, or a string that holds one."""
        if text != "null":
            text = self._loads(text, NO_OBJECT).strip()
            if self.error is None and text not in ("", "null"):
                try:
                    is_object = isinstance(json.loads(text), dict)
                except (ValueError, RecursionError):
                    is_object = False
                if not is_object:
                    self.error = NO_OBJECT
        if self.error is None:
            self.has_arguments = True
            self.arguments = "{}" if text in ("", "null") else text

    def _loads(self, text: str, otherwise: str) -> str:
        try:
            value = json.loads(text, strict=False)
        except ValueError:
            value = None
        if not isinstance(value, str):
            self.error = otherwise
            return ""
        return value
