"""Runs the application under uvicorn: one process, one engine, a drain at the end."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import anyio
import uvicorn

from cotrt.program.llm import LLM
from cotrt.server.app import app_of
from cotrt.server.listening import bind, cannot_listen
from cotrt.server.options import ServerOptions
from cotrt.server.service import Service

logger = logging.getLogger("cotrt.server")

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LOCAL = ("127.0.0.1", "localhost", "::1")

# So often a draining server looks whether work has ended.
_LOOK_S = 0.05
# Seconds in which work that was ended must have told its client so.
_LAST_WORDS_S = 2.0


class Server(uvicorn.Server):
    """uvicorn's server, which drains before it stops listening.

    From the first signal on new work gets a 503, live pages end, and what runs has
    ``options.shutdown_timeout_s`` to end by itself; a second SIGINT ends that time.
    """

    def __init__(
        self,
        llm: LLM,
        options: ServerOptions,
        on_start: Callable[[int], None] | None = None,
    ) -> None:
        self.service = Service(llm, options)
        self._on_start = on_start
        self._is_urgent = False
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
                # The drain comes first and ends the work itself; this cancels what is left.
                timeout_graceful_shutdown=5,
                h11_max_incomplete_event_size=64 << 10,
            )
        )

    @property
    def port(self) -> int:
        """The port that it listens on."""
        port: int = self.servers[0].sockets[0].getsockname()[1]
        return port

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then say so.

        Raises:
            InvalidRequestError: another program has come first.
        """
        try:
            await super().startup(sockets)
        except OSError as error:
            await self.lifespan.shutdown()
            raise cannot_listen(self.config.host, self.config.port, error) from error
        if self.started and self._on_start is not None:
            self._on_start(self.port)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM ask for a drain; a second SIGINT ends it.

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

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal. uvicorn's own would leave running work without an end at a second one."""
        self._is_urgent |= self.should_exit and sig == signal.SIGINT
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse new work, let running work end, then stop listening."""
        self.service.begin_draining()
        await self._drain()
        await super().shutdown(sockets)

    async def _drain(self) -> None:
        """Answer until the last work has ended, late work by our hand."""
        admission, seconds = self.service.admission, self.service.options.shutdown_timeout_s
        if admission.num_admitted:
            logger.info(
                "shutting down: %d outputs have %s s to end; Ctrl-C ends them now",
                admission.num_admitted,
                seconds,
            )
        with anyio.move_on_after(seconds):
            while admission.num_admitted and not self._is_urgent:
                await anyio.sleep(_LOOK_S)
        if not admission.num_admitted:
            return
        logger.warning("%d outputs still ran; they end now", admission.num_admitted)
        with anyio.move_on_after(_LAST_WORDS_S):
            while admission.num_admitted:
                self.service.cancel_all()  # once more: some may only now have come to the engine
                await anyio.sleep(_LOOK_S)
        if admission.num_admitted:  # their clients do not read what they are told
            for connection in list(self.server_state.connections):
                connection.transport.abort()


def serve(
    llm: LLM,
    options: ServerOptions,
    *,
    on_start: Callable[[int], None] | None = None,
    sockets: Sequence[socket.socket] | None = None,
) -> int:
    """Serve until SIGINT or SIGTERM. The caller closes the LLM.

    Args:
        llm: what answers.
        options: where to listen, keys, limits.
        on_start: called with the port once it listens.
        sockets: bound ones to listen on, by default those of the options; they are closed.

    Returns:
        The process's exit code.

    Raises:
        InvalidRequestError: it cannot listen there.
    """
    if options.host not in _LOCAL and not options.api_keys:
        logger.warning(
            "listening on %s without an API key: everybody who reaches it may use it; give "
            "--api-key, or --host 127.0.0.1",
            options.host,
        )
    server = Server(llm, options, on_start)
    if sockets is None:
        sockets = bind(options.host, options.port)
    try:
        server.run(list(sockets))
    except SystemExit as stop:  # uvicorn's own end where the application does not start
        return _code(stop.code)
    return 0 if server.started else 1


def _code(code: Any) -> int:
    return code if isinstance(code, int) else 1
