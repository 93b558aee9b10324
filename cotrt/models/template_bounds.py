"""How much one call or operator of a chat template may make: its result is bounded before.

What a message says is data, whatever characters it holds. Bounded are a template's own format
strings, widths and counts; a content comes under them only where the template uses it as one. Every
check takes time linear in what it looks at.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.sandbox import SandboxedFormatter

MAX_CHARACTERS = 16_000_000
MAX_WIDTH = 1_000_000
# Deeper indentation of JSON is no use to a model, and multiplies what a template makes.
MAX_JSON_INDENT = 256

_DIGITS = re.compile(r"\d+")
_FLAGS = "-+ #0"


def check_size(size: int, what: str) -> None:
    """Refuse a result of too many characters.

    Raises:
        SecurityError: says what would be too large.
    """
    if size > MAX_CHARACTERS:
        raise SecurityError(
            f"{what} would have {size} characters; a template may make {MAX_CHARACTERS}"
        )


def check_width(width: Any) -> None:
    """Refuse a padding or a format's width of more than a million characters.

    Raises:
        SecurityError: says how wide it is.
    """
    if isinstance(width, int) and width > MAX_WIDTH:
        raise SecurityError(
            f"a width of {width} is not allowed in a template: the limit is {MAX_WIDTH}"
        )


def _check_digits(digits: str) -> None:
    # int() takes quadratic time, and refuses very long numbers.
    check_width(int(digits) if len(digits) < 20 else 10**20)


class BoundedFormatter(SandboxedFormatter):
    """``str.format`` in the sandbox, with bounds on widths and on the whole."""

    _size = 0

    def format_field(self, value: Any, format_spec: str) -> Any:
        """One field, its width known: nested fields of it are resolved."""
        for digits in _DIGITS.findall(format_spec):
            _check_digits(digits)
        made = super().format_field(value, format_spec)
        self._size += len(made)
        check_size(self._size, "a formatted text")
        return made


def check_percent(form: str, values: Any) -> None:
    """Refuse ``form % values`` where a width of it, or its result, is too large.

    Raises:
        SecurityError: says which.
    """
    given = values if isinstance(values, tuple) else (values,)
    starred = False
    fields = 0
    for digits in _percent_widths(form):
        fields += 1
        if digits == "*":
            starred = True
        elif digits:
            _check_digits(digits)
    if starred:
        for value in given:
            check_width(value)
    if isinstance(values, Mapping):  # a field may be used again and again
        largest = max((len(v) for v in values.values() if isinstance(v, str)), default=0)
        check_size(len(form) + fields * largest, "a formatted text")
    else:
        texts = sum(len(value) for value in given if isinstance(value, str))
        check_size(len(form) + texts, "a formatted text")


def _percent_widths(form: str) -> Iterator[str]:
    """Widths and precisions of a printf-style format: digits, "*", or ""."""
    at, end = form.find("%"), len(form)
    while 0 <= at < end:
        at += 1
        if form.startswith("(", at):
            depth = 0
            while at < end:
                depth += {"(": 1, ")": -1}.get(form[at], 0)
                at += 1
                if not depth:
                    break
        while at < end and form[at] in _FLAGS:
            at += 1
        at, width = _number(form, at)
        yield width
        if form.startswith(".", at):
            at, precision = _number(form, at + 1)
            yield precision
        at = form.find("%", at + 1)


def _number(form: str, at: int) -> tuple[int, str]:
    if form.startswith("*", at):
        return at + 1, "*"
    found = _DIGITS.match(form, at)
    return (at, "") if found is None else (found.end(), found[0])


def _argument(args: Sequence[Any], kwargs: Mapping[str, Any], at: int, name: str) -> Any:
    return args[at] if len(args) > at else kwargs.get(name)


def _padded(text: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    check_width(_argument(args, kwargs, 0, "width"))


def _expanded(text: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    size = _argument(args, kwargs, 0, "tabsize")
    check_width(size)
    if isinstance(size, int):
        check_size(len(text) + text.count("\t") * max(0, size), "expandtabs")


def _replaced(text: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    if len(args) > 1 and isinstance(args[0], str) and isinstance(args[1], str):
        check_size(len(text) + text.count(args[0]) * len(args[1]), "replace")


def _translated(text: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    table = args[0] if args else None
    values: Any = table.values() if isinstance(table, Mapping) else table
    if isinstance(table, (Mapping, list, tuple)):
        longest = max((len(v) for v in values if isinstance(v, str)), default=1)
        check_size(len(text) * longest, "translate")


def _joined(text: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    parts = args[0] if args else None
    if isinstance(parts, (list, tuple)):
        size = sum(len(part) for part in parts if isinstance(part, str))
        check_size(size + len(text) * len(parts), "join")


_METHODS: dict[str, Callable[[str, Sequence[Any], Mapping[str, Any]], None]] = {
    "center": _padded,
    "ljust": _padded,
    "rjust": _padded,
    "zfill": _padded,
    "expandtabs": _expanded,
    "replace": _replaced,
    "translate": _translated,
    "join": _joined,
}


def check_method(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a call of a text's own method whose result would be too large.

    Raises:
        SecurityError: says what is too large.
    """
    text = getattr(function, "__self__", None)
    if isinstance(text, str):
        check = _METHODS.get(getattr(function, "__name__", ""))
        if check is not None:
            check(text, args, kwargs)


def check_filter(name: str, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a filter whose result would be too large.

    Known are ``center``, ``format``, ``indent``, ``join`` and ``replace``.

    Raises:
        SecurityError: says what is too large.
    """
    if name == "format":
        check_percent(str(value), kwargs or tuple(args))
        return
    if name == "replace":
        old, new = _argument(args, kwargs, 0, "s"), _argument(args, kwargs, 1, "new")
        _replaced(str(value), [str(old), str(new)], {})
        return
    if name == "join":
        _joined(str(_argument(args, kwargs, 0, "d") or ""), [value], {})
        return
    width = _argument(args, kwargs, 0, "width")
    check_width(width)
    if name == "indent":
        size = len(width) if isinstance(width, str) else width if isinstance(width, int) else 4
        text = str(value)
        check_size(len(text) + (text.count("\n") + 1) * max(0, size), "indent")


def operator_size(operator: str, left: Any, right: Any) -> int:
    """Characters or items that an operator would make; for integers 1000 a bit."""
    sized = (str, list, tuple)
    numbers = isinstance(left, int) and isinstance(right, int)
    if operator == "+":
        return len(left) + len(right) if isinstance(left, sized) and isinstance(right, sized) else 0
    if operator == "**":
        return 1000 * left.bit_length() * right if numbers else 0
    if operator != "*":
        return 0
    if numbers:
        return 1000 * int(left.bit_length() + right.bit_length())
    if isinstance(left, sized) and isinstance(right, int):
        return len(left) * right
    return left * len(right) if isinstance(left, int) and isinstance(right, sized) else 0
