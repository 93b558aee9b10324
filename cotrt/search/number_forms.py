"""Numbers as people and models write them, in one form each, so that equal answers share a vote.

Everything here is linear in the text.
"""

from __future__ import annotations

import re
from fractions import Fraction

_MINUS = str.maketrans({"\u2212": "-", "\u2013": "-", "\ufe63": "-", "\uff0d": "-"})
# Greedy, and nothing after it: it cannot back off into a piece of a number.
_RUN = re.compile(
    r"(?P<sign>[-+\u2212\u2013\ufe63\uff0d]?)(?P<money>[$\u20ac\u00a3\u00a5]?)"
    r"(?P<digits>[0-9]+(?:,[0-9]+)*(?:\.[0-9]+)*|(?:\.[0-9]+)+)"
    r"(?P<exponent>(?:[eE][-+]?[0-9]+)?)"
)
_OVER = re.compile(r"/([0-9]+)")
_GOES_ON = re.compile(r"[/.]?[0-9]|/")
_WORD = re.compile(r"[^\W\d_]*")
_GROUPED = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+")
_DECIMAL = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)")
_ORDINALS = ("st", "nd", "rd", "th")
# Beyond these a number stays as it is written: nobody votes by them, and powers of ten grow.
_MOST_EXPONENT, _MOST_DIGITS, _MOST_DECIMALS = 400, 200, 20


def plain_decimal(digits: str) -> str | None:
    """``"-007.50"`` as ``"-7.5"``, of any length; None where it is no decimal number."""
    if not _DECIMAL.fullmatch(digits):
        return None
    sign = "-" if digits.startswith("-") else ""
    whole, _, part = digits.lstrip("+-").partition(".")
    whole, part = whole.lstrip("0") or "0", part.rstrip("0")
    number = f"{whole}.{part}" if part else whole
    return number if number == "0" else sign + number


def plain_fraction(value: Fraction) -> str:
    """A decimal number where that is exact and short, else ``p/q``."""
    below, tens = value.denominator, 0
    for prime in (2, 5):
        count = 0
        while below % prime == 0:
            below //= prime
            count += 1
        tens = max(tens, count)
    if below != 1 or tens > _MOST_DECIMALS:
        return f"{value.numerator}/{value.denominator}"
    scaled = value.numerator * 10**tens // value.denominator
    digits = str(abs(scaled)).rjust(tens + 1, "0")
    text = f"{digits[:-tens]}.{digits[-tens:]}" if tens else digits
    return plain_decimal(f"{'-' if scaled < 0 else ''}{text}") or text


def times_ten(digits: str, exponent: str) -> str | None:
    """``digits * 10^exponent`` as a plain number; None where it would be too long."""
    exponent = exponent.translate(_MINUS)
    if len(digits) > _MOST_DIGITS or len(exponent) > 4 or abs(int(exponent)) > _MOST_EXPONENT:
        return None
    number = plain_decimal(digits)
    return (
        None if number is None else plain_fraction(Fraction(number) * Fraction(10) ** int(exponent))
    )


def quotient(above: str, below: str) -> str | None:
    """``above / below`` as a plain number; None by zero, or where they are too long."""
    if max(len(above), len(below)) > _MOST_DIGITS or not int(below or "0"):
        return None
    number = plain_decimal(above)
    return None if number is None else plain_fraction(Fraction(number) / int(below))


def numbers_in(text: str) -> list[str]:
    """The numbers of a text in their order, each whole: with sign, fraction, exponent.

    Units may follow without a space (``12.5kg``). What is part of a word (``v2``, ``x86``, ``3rd``,
    ``0x1f``), a version or a date with dots is no number.
    """
    found = []
    end = 0
    for run in _RUN.finditer(text):
        if run.start() < end:
            continue  # it was a part of what came before
        number, end = _whole(text, run)
        if number is not None:
            found.append(number)
    return found


def _whole(text: str, run: re.Match[str]) -> tuple[str | None, int]:
    """The number of a run of digits, or None; and where it ends."""
    sign, end = run["sign"].translate(_MINUS), run.end()
    before = text[run.start() - 1 : run.start()]
    joined = before == "." or before == "_" or before.isalnum()
    if sign and (joined or before in (")", "]", "}")):
        sign, joined = "", False  # a minus between two terms
    after = _WORD.match(text, end)
    word = after.group() if after else ""
    stop = end + len(word)
    if joined or text[stop : stop + 1] == "_" or text[stop : stop + 1].isalnum():
        return None, stop
    if word.lower() in _ORDINALS and run["digits"].isdigit():
        return None, stop
    groups, dot, decimals = run["digits"].partition(".")
    if "." in decimals:
        return None, stop  # 1.2.3
    if "," in groups and not _GROUPED.fullmatch(groups):
        groups, sign = groups.rpartition(",")[2], ""  # a list: its last entry
    digits = sign.replace("+", "") + groups.replace(",", "") + dot + decimals
    over = None if word else _OVER.match(text, end)
    if over and not dot and not _GOES_ON.match(text, over.end()):
        return quotient(digits, over[1]), over.end()
    if run["exponent"]:
        return times_ten(digits, run["exponent"][1:]) or digits + run["exponent"].lower(), end
    return plain_decimal(digits), end
