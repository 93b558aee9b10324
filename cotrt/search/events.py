"""What a search tells while it runs, and a log of it."""

from __future__ import annotations

import inspect
import json
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal

Kind = Literal["start", "node", "score", "state", "end"]


@dataclass(frozen=True)
class SearchEvent:
    """Something that happened in a search.

    Attributes:
        kind: "start", "node" (a node has grown), "score", "state" (pruned, finished or cut),
            "end".
        algorithm: the search's name.
        time_s: seconds since the search began.
        node_id: the node, or None for "start" and "end".
        node: the live node of "node", "score" and "state" events: ``event.node.branch`` can be
            forked. Not in the log.
        data: the rest, ready for JSON.
    """

    kind: Kind
    algorithm: str
    time_s: float
    node_id: int | None = None
    node: Any = None
    data: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """One line of JSON."""
        head = {"kind": self.kind, "algorithm": self.algorithm, "time_s": round(self.time_s, 6)}
        if self.node_id is not None:
            head["node_id"] = self.node_id
        return json.dumps(head | self.data, ensure_ascii=False)


OnEvent = Callable[[SearchEvent], Any]


class Listener:
    """Tells an ``on_event``, sync or async, or nobody.

    Sync ones are called at once; the calls of async ones wait for `flush`, because what they tell
    of may happen where nothing can be awaited.
    """

    def __init__(self, on_event: OnEvent | None, algorithm: str) -> None:
        self._on_event, self._algorithm = on_event, algorithm
        self._late: list[Awaitable[Any]] = []
        self._started = 0.0

    @property
    def is_listening(self) -> bool:
        """Somebody wants to hear."""
        return self._on_event is not None

    def start(self) -> None:
        """The search begins now."""
        self._started = time.monotonic()

    def tell(self, kind: Kind, node: Any, data: dict[str, Any]) -> None:
        """One event."""
        if self._on_event is None:
            return
        elapsed = time.monotonic() - self._started
        node_id = None if node is None else node.id
        value = self._on_event(SearchEvent(kind, self._algorithm, elapsed, node_id, node, data))
        if inspect.isawaitable(value):
            self._late.append(value)

    async def flush(self) -> None:
        """Let an async ``on_event`` hear what has happened."""
        while self._late:
            await self._late.pop(0)

    def forget(self) -> None:
        """Nothing can be awaited any more."""
        for late in self._late:
            if inspect.iscoroutine(late):
                late.close()
        self._late.clear()


class JsonLog:
    """An ``on_event`` that appends one JSON line an event; a context manager.

    Args:
        path: the file; lines are added to what it holds.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file: IO[str] | None = self.path.open("a", encoding="utf-8", errors="replace")

    def __call__(self, event: SearchEvent) -> None:
        """Write and flush one event; nothing after `close`."""
        if self._file is not None:
            self._file.write(event.to_json() + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> JsonLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
