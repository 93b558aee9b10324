r"""Answers in LaTeX, in one form each: what stands in ``\boxed{}``, as a reader would say it."""

from __future__ import annotations

import re

from cotrt.search.number_forms import numbers_in, plain_decimal, quotient, times_ten

# What says how an answer looks, and not what it is.
_LOOKS = re.compile(
    r"\\(?:left|right|displaystyle|limits|big|Big|bigl|bigr|quad|qquad)(?![A-Za-z])"
    r"|\\[!,;:> ]|\\\$|\$|~|\\%|%|(?:\^\s*\{?\s*)?(?:\\circ|\\degree)(?![A-Za-z])\s*\}?|°"
)
_FRACTION = re.compile(r"\\[dtc]?frac(?![A-Za-z])")
_WORDS = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}"
)
_NAMED = re.compile(r"[A-Za-z]\w*\s*=(?!=)\s*")
_DECIMAL = r"[-+\u2212]?\s*(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)"
_TEN = re.compile(
    rf"({_DECIMAL})\s*(?:\\times|\\cdot|\u00d7|\*|x)\s*10\s*\^\s*\{{?\s*([-\u2212+]?[0-9]+)\s*\}}?"
)
_QUOTIENT = re.compile(
    r"(?P<sign>[-+\u2212]?)\s*(?P<whole>[0-9]*)\s*\\frac\s*"
    r"(?:\{\s*(?P<above>[-\u2212]?[0-9]+)\s*\}\s*\{\s*(?P<below>[0-9]+)\s*\}"
    r"|(?P<a>[0-9])\s*(?P<b>[0-9]))"
)
_PLAIN_QUOTIENT = re.compile(r"([-+\u2212]?\s*[0-9]+)\s*/\s*([0-9]+)")
_MEASURE = re.compile(
    rf"({_DECIMAL})(\s*)([^\W\d_][^\d\\{{}}()=+*<>]*?)(?:\s*\^\s*\{{?\s*[23]\s*\}}?)?"
)
# Letters after a number that are units; others may be variables, and the answer a formula.
_SHORT_UNITS = frozenset(
    [
        "cm", "mm", "km", "dm", "nm", "kg", "mg", "ml", "dl", "ft", "in", "yd", "mi", "lb", "oz",
        "mph", "kph", "hr", "hrs", "min", "sec", "ms", "rad", "deg", "kB", "MB", "GB", "kW", "Hz",
        "kHz", "MHz", "eV", "kJ", "kPa", "Pa",
    ]
)  # fmt: skip
_LETTER_UNITS = frozenset(["m", "g", "s", "h", "L", "l", "N", "J", "W", "V", "K", "C", "F"])
_SPACES = re.compile(r"\s+")
_AROUND_SIGNS = re.compile(r"\s*([^\w\s])\s*")


def reading(answer: str) -> str:
    r"""An answer as a reader would say it: equal answers in other spellings are equal here.

    Looks go (spaces, ``\left``, ``\dfrac``, dollar and percent signs, degrees), ``x = 5`` is 5,
    units after a number go, and fractions, mixed numbers and powers of ten are one plain number.
    Other formulas stay, without spaces that mean nothing.
    """
    text = answer.replace("{,}", ",")
    text = _WORDS.sub(r" \1 ", text)
    text = _LOOKS.sub(" ", text)
    text = _FRACTION.sub(r"\\frac", text)
    text = _SPACES.sub(" ", text).strip()
    if len(text) > 1:
        text = text.removesuffix(".").strip()
    named = _NAMED.match(text)
    if named:
        text = text[named.end() :]
    return _number(text) or _AROUND_SIGNS.sub(r"\1", text)


def _number(text: str) -> str | None:
    """The plain number that the whole text is, with a unit or without."""
    ten = _TEN.fullmatch(text)
    if ten:
        return times_ten(_digits(ten[1]), ten[2])
    parts = _QUOTIENT.fullmatch(text)
    if parts:
        above, below = parts["above"] or parts["a"], parts["below"] or parts["b"]
        sign = "-" if parts["sign"] in ("-", "\u2212") else ""
        if parts["whole"]:  # 1 1/2
            if len(parts["whole"]) + len(below) > 100 or not above.isdigit():
                return None
            above = str(int(parts["whole"]) * int(below) + int(above))
        above = _digits(above)
        return quotient(above[1:] if sign and above[:1] == "-" else sign + above, below)
    plain = _PLAIN_QUOTIENT.fullmatch(text)
    if plain:
        return quotient(_digits(plain[1]), plain[2])
    measure = _MEASURE.fullmatch(text)
    has_unit = measure is not None and _is_unit(measure[3], apart=bool(measure[2]))
    number = plain_decimal(_digits(measure[1] if measure and has_unit else text))
    if number is not None:
        return number
    found = numbers_in(text)  # 2.5e3
    return (
        found[0]
        if len(found) == 1 and re.fullmatch(r"[-+]?[0-9.,]+[eE][-+]?[0-9]+", text)
        else None
    )


def _is_unit(words: str, *, apart: bool) -> bool:
    """Words after a number say what it counts: ``cm``, ``m/s`` or ``square feet``.

    Args:
        words: they.
        apart: a space stands before them.
    """
    first, *more = re.split(r"[\s/]+", words.strip())
    known = first in _SHORT_UNITS or (apart and (len(first) > 2 or first in _LETTER_UNITS))
    return known and all(len(word) > 1 or word in _LETTER_UNITS for word in more)


def _digits(text: str) -> str:
    return text.replace("\u2212", "-").replace(",", "").replace(" ", "").removeprefix("+")
