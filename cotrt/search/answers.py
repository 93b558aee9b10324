"""Answers in texts: extractors, and when two answers are the same."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from typing import Any

from cotrt.errors import InvalidRequestError
from cotrt.search.latex_forms import reading
from cotrt.search.number_forms import numbers_in

Extractor = Callable[[str], Any]

_BRACES = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)


def boxed(text: str) -> str | None:
    r"""The contents of the last ``\boxed{...}`` that is not empty, braces matched, or None."""
    open_braces: list[int | None] = []  # where a box begins, None for other braces
    last, place = None, -1
    for found in _BRACES.finditer(text):
        brace = found.group()
        if brace == "}":
            begin = open_braces.pop() if open_braces else None
            if begin is not None and begin > place:
                inside = text[begin : found.start()].strip()
                if inside:
                    last, place = inside, begin
        elif brace[-1] == "{" and brace != "\\{":
            open_braces.append(found.end() if brace != "{" else None)
    return last


def last_number(text: str) -> str | None:
    """The last number, whole and in one form (`numbers_in`); None without one."""
    found = numbers_in(text)
    return found[-1] if found else None


def final_answer(text: str) -> str | None:
    r"""What is in the last ``\boxed{}``, as a reader says it, else the last number.

    The default of votes.
    """
    inside = boxed(text)
    return last_number(text) if inside is None else reading(inside)


_NAMED: dict[str, Extractor] = {
    "boxed": boxed,
    "number": last_number,
    "answer": final_answer,
}


def as_extractor(extract: str | re.Pattern[str] | Extractor) -> Extractor:
    """An extractor by name, as a regular expression, or as it is.

    Args:
        extract: "boxed", "number" or "answer" (boxed, else the last number); a compiled regular
            expression (its last match: group 1 if it has groups); or ``text -> hashable or None``,
            sync or async.

    Raises:
        InvalidRequestError: none of these.
    """
    if isinstance(extract, str):
        if extract not in _NAMED:
            raise InvalidRequestError(
                f"extract={extract!r}: must be one of {sorted(_NAMED)}, re.compile(...) or a "
                "function"
            )
        return _NAMED[extract]
    if isinstance(extract, re.Pattern):
        pattern = extract

        def by_pattern(text: str) -> str | None:
            found = list(pattern.finditer(text))
            if not found:
                return None
            return str(found[-1].group(1 if pattern.groups else 0) or "").strip() or None

        return by_pattern
    if not callable(extract):
        raise InvalidRequestError(f"extract={extract!r}: must be a name, a pattern or a function")
    return extract


def check_answer(answer: Any) -> Any:
    """An extracted answer is hashable, or None.

    Raises:
        InvalidRequestError: it is not.
    """
    if answer is not None and not isinstance(answer, Hashable):
        raise InvalidRequestError(
            f"extract gave {answer!r}, which is not hashable: return a str, a number or a tuple"
        )
    return answer
