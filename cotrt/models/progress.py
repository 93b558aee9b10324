"""One progress bar: on stderr, and only where somebody can see it."""

from __future__ import annotations

import sys
from typing import Any


class ProgressBar:
    """A tqdm bar, or nothing.

    Args:
        title: before the bar.
        total: amount in all.
        unit: "B" is scaled to MB.
        show: None: if stderr is a terminal.
    """

    def __init__(self, title: str, total: int, unit: str, show: bool | None) -> None:
        self._total = total
        self._tqdm: Any = None
        if sys.stderr.isatty() if show is None else show:
            from tqdm import tqdm

            self._tqdm = tqdm(desc=title, total=total, unit=unit, unit_scale=unit == "B")

    def update(self, done: int) -> None:
        """Show the amount done so far, not the step."""
        if self._tqdm is not None:
            self._tqdm.update(max(0, min(done, self._total) - self._tqdm.n))

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._tqdm is not None:
            self._tqdm.close()
