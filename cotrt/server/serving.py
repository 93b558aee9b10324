"""Runs the application under uvicorn: one process, one engine, a drain at the end."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import uvicorn

from cotrt.llm import LLM
from cotrt.server.app import app_of
from cotrt.server.options import ServerOptions
from cotrt.server.service import Service

logger = logging.getLogger("cotrt.server")

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LOCAL = ("127.0.0.1", "localhost", "::1")


class Server(uvicorn.Server):
    """uvicorn's server, which tells the service when it begins to end.

    From then on new work gets a 503, live pages end, and what runs has
    ``options.shutdown_timeout_s`` to end by itself.
    """

    def __init__(
        self,
        llm: LLM,
        options: ServerOptions,
        on_start: Callable[[int], None] | None = None,
    ) -> None:
        self.service = Service(llm, options)
        self._on_start = on_start
        # It would log query strings, where somebody may have put a key; the guard logs paths.
        logging.getLogger("uvicorn.access").disabled = True
        super().__init__(
            uvicorn.Config(
                app_of(self.service),
                host=options.host,
                port=options.port,
                log_config=None,
                access_log=False,
                ws="none",
                lifespan="on",
                server_header=False,
                proxy_headers=False,
                # Ours comes first and ends the work itself; this one cancels what is left.
                timeout_graceful_shutdown=round(options.shutdown_timeout_s) + 5,
                h11_max_incomplete_event_size=64 << 10,
            )
        )

    @property
    def port(self) -> int:
        """The port that it listens on."""
        port: int = self.servers[0].sockets[0].getsockname()[1]
        return port

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then say so."""
        await super().startup(sockets)
        if self.started and self._on_start is not None:
            self._on_start(self.port)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM ask for a drain; a second one ends it.

        Unlike uvicorn's own it does not raise the signal again when all is done: a drained server
        leaves with exit code 0.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {each: signal.signal(each, self.handle_exit) for each in _SIGNALS}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse new work, let running work end, then stop."""
        self.service.begin_draining()
        async with anyio.create_task_group() as group:
            group.start_soon(self._end_late_work)
            await super().shutdown(sockets)
            group.cancel_scope.cancel()

    async def _end_late_work(self) -> None:
        seconds = self.service.options.shutdown_timeout_s
        await anyio.sleep(seconds)
        logger.warning("requests still ran after %s s of draining; they end now", seconds)
        self.service.cancel_all()


def serve(
    llm: LLM, options: ServerOptions, *, on_start: Callable[[int], None] | None = None
) -> int:
    """Serve until SIGINT or SIGTERM. The caller closes the LLM.

    Args:
        llm: what answers.
        options: where to listen, keys, limits.
        on_start: called with the port once it listens.

    Returns:
        The process's exit code.
    """
    if options.host not in _LOCAL and not options.api_keys:
        logger.warning(
            "listening on %s without an API key: everybody who reaches it may use it; give "
            "--api-key, or --host 127.0.0.1",
            options.host,
        )
    server = Server(llm, options, on_start)
    try:
        server.run()
    except SystemExit as stop:  # uvicorn's own end where it cannot listen
        return _code(stop.code)
    return 0 if server.started else 1


def _code(code: Any) -> int:
    return code if isinstance(code, int) else 1
