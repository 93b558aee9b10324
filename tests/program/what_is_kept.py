"""What an engine still holds: its objects, its tables and its memory, to compare over rounds."""

from __future__ import annotations

import gc
import os
from collections import Counter, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_TABLES = (list, dict, set, deque)
_PROC = Path("/proc/self")


def living() -> Counter[str]:
    """How many objects of each of cotrt's classes are alive in this process."""
    gc.collect()
    kinds = (type(each) for each in gc.get_objects())
    return Counter(kind.__qualname__ for kind in kinds if str(kind.__module__).startswith("cotrt."))


def grown(now: Mapping[str, int], before: Mapping[str, int], rounds: int) -> dict[str, int]:
    """What has grown by a quarter of the rounds between, or more; less is what is cached now."""
    more = {name: count - before.get(name, 0) for name, count in now.items()}
    return {name: count for name, count in more.items() if count >= rounds / 4}


def table_lengths(*owners: Any) -> dict[str, int]:
    """Lengths of the lists, dicts, sets and deques that `owners` hold, by class and name."""
    return {
        f"{type(owner).__name__}.{name}": len(value)
        for owner in owners
        for name, value in vars(owner).items()
        if isinstance(value, _TABLES)
    }


def engine_tables(llm: Any) -> dict[str, int]:
    """`table_lengths` of the parts of an LLM's engine."""
    runtime = llm._runtime
    engine = runtime.engine
    with engine.lock:
        return table_lengths(
            runtime, runtime.driver, engine, engine.scheduler, engine.table, engine._outcomes,
            engine.tree, engine._runner,
        )  # fmt: skip


def resident_bytes() -> int:
    """Bytes of this process that are in memory (Linux)."""
    return int((_PROC / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def resident_growth(work: Callable[[], None], *, enough: int) -> int:
    """Bytes that resident memory grew by in a run of `work`, or in the median one of three.

    What each run keeps is kept in all of them. What allocators take from the system, or a library
    pages in, is not: a first run that grew by `enough` or more is one of three.
    """

    def growth() -> int:
        before = resident_bytes()
        work()
        return resident_bytes() - before

    first = growth()
    return first if first < enough else sorted([first, growth(), growth()])[1]


def forget_peak() -> None:
    """Let `peak_bytes` begin anew, from what is resident now."""
    (_PROC / "clear_refs").write_text("5")


def peak_bytes() -> int:
    """The most bytes of this process that were in memory at once (Linux)."""
    for line in (_PROC / "status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("no VmHWM in /proc/self/status")
