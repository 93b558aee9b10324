"""Handles of work that runs on a server, each with a thread and a connection of its own."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class RemoteHandle(Generic[T]):
    """Work on the server that started when the handle was made; as `cotrt.Handle`."""

    def __init__(self, work: Callable[[Callable[[Any], None]], T]) -> None:
        self._done = threading.Event()
        self._result: T | None = None
        self._error: BaseException | None = None
        self._cancelled = False
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()

        def run() -> None:
            try:
                self._result = work(self._linked)
            except BaseException as error:
                self._error = error
            finally:
                self._end()

        threading.Thread(target=run, daemon=True, name="cotrt-client").start()

    def _end(self) -> None:
        self._done.set()

    @property
    def done(self) -> bool:
        """Whether the work has ended, in whatever way."""
        return self._done.is_set()

    def cancel(self) -> None:
        """Close the connection; the server then stops the work."""
        with self._lock:
            self._cancelled = True
            link = self._socket
        if link is not None and not self.done:
            shut(link)

    def result(self, timeout: float | None = None) -> T:
        """Wait for the work to end.

        Raises:
            TimeoutError: `timeout` seconds went by; the work runs on.
            concurrent.futures.CancelledError: it was cancelled and has no partial result.
            CotrtError: the server refused or failed.
            ConnectionError: the connection broke (a CotrtError too).
        """
        if not self._done.wait(timeout):
            raise TimeoutError(f"not done after {timeout} s; the work runs on")
        return self._collect()

    def _collect(self) -> T:
        if self._error is not None:
            if self._cancelled:
                from concurrent.futures import CancelledError

                raise CancelledError("the work was cancelled")
            raise self._error
        return self._result  # type: ignore[return-value]

    def __await__(self) -> Generator[Any, None, T]:
        return self._wait().__await__()

    async def _wait(self) -> T:
        import anyio.to_thread

        try:
            await anyio.to_thread.run_sync(self._done.wait, abandon_on_cancel=True)
        except BaseException:
            self.cancel()
            raise
        return self._collect()

    def _linked(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            self._socket = connection.sock
            cancelled = self._cancelled
        if cancelled:
            shut(connection.sock)


class RemoteGathered(Sequence[RemoteHandle[T]]):
    """Handles of several works, and a handle of the list of their results."""

    def __init__(self, items: Sequence[RemoteHandle[T]]) -> None:
        self._items = list(items)

    @property
    def done(self) -> bool:
        """Whether all have ended."""
        return all(item.done for item in self._items)

    def cancel(self) -> None:
        """Cancel all."""
        for item in self._items:
            item.cancel()

    def result(self, timeout: float | None = None) -> list[T]:
        """The results in order; the first error is raised after all have ended.

        Raises:
            TimeoutError, CotrtError: as `RemoteHandle.result`.
        """
        for item in self._items:
            if not item._done.wait(timeout):
                raise TimeoutError(f"not done after {timeout} s; the work runs on")
        return [item.result() for item in self._items]

    def __await__(self) -> Generator[Any, None, list[T]]:
        return self._wait().__await__()

    async def _wait(self) -> list[T]:
        return [await item for item in self._items]

    @overload
    def __getitem__(self, index: int) -> RemoteHandle[T]: ...
    @overload
    def __getitem__(self, index: slice) -> list[RemoteHandle[T]]: ...
    def __getitem__(self, index: int | slice) -> RemoteHandle[T] | list[RemoteHandle[T]]:
        return self._items[index]

    def __len__(self) -> int:
        return len(self._items)


def shut(link: socket.socket | None) -> None:
    if link is not None:
        with contextlib.suppress(OSError):
            link.shutdown(socket.SHUT_RDWR)
