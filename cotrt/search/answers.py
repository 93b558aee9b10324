"""Answers in texts: extractors, and when two answers are the same."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from typing import Any

from cotrt.errors import InvalidRequestError

Extractor = Callable[[str], Any]

_NUMBER = re.compile(r"(?<![\w.])-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?!\w)")


def boxed(text: str) -> str | None:
    r"""The contents of the last ``\boxed{...}`` that is not empty, braces matched, or None."""
    for start in reversed([found.end() for found in re.finditer(r"\\boxed\s*\{", text)]):
        depth = 1
        for index in range(start, len(text)):
            if text[index] == "{":
                depth += 1
            elif text[index] == "}":
                depth -= 1
                if depth == 0:
                    inside = text[start:index].strip()
                    if inside:
                        return inside
                    break
    return None


def last_number(text: str) -> str | None:
    """The last number, without thousands separators and trailing zeros; None without one."""
    found = _NUMBER.findall(text)
    return plain_number(found[-1]) if found else None


def plain_number(text: str) -> str:
    """``"1,024.50"`` as ``"1024.5"``; other text as it is."""
    number = text.replace(",", "")
    if not re.fullmatch(r"-?\d+(\.\d+)?", number):
        return text
    if "." in number:
        number = number.rstrip("0").rstrip(".")
    sign, digits = ("-", number[1:]) if number.startswith("-") else ("", number)
    digits = digits.lstrip("0") or "0"
    digits = "0" + digits if digits.startswith(".") else digits
    return "0" if digits == "0" else sign + digits


def final_answer(text: str) -> str | None:
    r"""What is in the last ``\boxed{}``, else the last number: the default of votes."""
    inside = boxed(text)
    return last_number(text) if inside is None else plain_number(inside)


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
