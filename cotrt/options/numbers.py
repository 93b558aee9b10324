"""Python's own ints and floats of whatever counts as one, numpy's among them."""

from __future__ import annotations

import numbers
import operator
from typing import Any


def plain_int(value: Any) -> int | None:
    """`value` as an int where it is one (it has ``__index__`` and is no bool); else None."""
    if type(value) is int:
        return value
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # numpy's own bool refuses
    except Exception:  # an array of several, say
        return None


def plain_float(value: Any) -> float | int | None:
    """`value` as a float, or as an int where it is one; None where it is no real number."""
    if isinstance(value, numbers.Real) and not isinstance(value, (bool, numbers.Integral)):
        return float(value)
    return plain_int(value)


def plain_ints(values: Any) -> list[Any]:
    """A list of `values` with all that are ints as Python's own; the others as they are."""
    items = values.tolist() if hasattr(values, "tolist") else list(values)
    if all(type(item) is int for item in items):
        return items
    whole = [plain_int(item) for item in items]
    return [item if number is None else number for item, number in zip(items, whole)]
