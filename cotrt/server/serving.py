"""Runs the application under uvicorn: one process, one engine, a drain at the end."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from typing import Any

import uvicorn

from cotrt.llm import LLM
from cotrt.server.app import app_of
from cotrt.server.options import ServerOptions
from cotrt.server.service import Service

logger = logging.getLogger("cotrt.server")

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
                timeout_graceful_shutdown=max(1, round(options.shutdown_timeout_s)),
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

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse new work, let running work end, then stop."""
        self.service.begin_draining()
        await super().shutdown(sockets)


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
    except KeyboardInterrupt:
        return 0  # it has drained before it raises
    return 0 if server.started else 1


def _code(code: Any) -> int:
    return code if isinstance(code, int) else 1
