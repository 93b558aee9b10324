"""What a command can check of its flags before it loads a model."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable


def at_least(low: int, kind: type[int] | type[float] = int) -> Callable[[str], float]:
    """An argparse type: a finite number of at least `low`; what is not is refused by its flag."""

    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < low:
            what = "an int" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r}: must be {what} of at least {low}")
        return value

    return read


def check_can_write(path: str | None, flag: str) -> None:
    """Refuse a file that could not be written later, when the work for it is done.

    Raises:
        InvalidRequestError: names the flag, and what is wrong.
    """
    from cotrt.errors import InvalidRequestError

    if path is None:
        return
    folder = os.path.dirname(path) or "."
    problem = None
    if not os.path.isdir(folder):
        problem = f"there is no folder {folder!r}"
    elif os.path.isdir(path):
        problem = "it is a folder"
    elif not os.access(path if os.path.exists(path) else folder, os.W_OK):
        problem = "it cannot be written there"
    if problem is not None:
        raise InvalidRequestError(f"{flag} {path}: {problem}; name another file")
