"""In front of every route: a request id, the API key, the access log."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import re
import secrets
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cotrt.server.errors import ApiError
from cotrt.server.options import ServerOptions
from cotrt.server.wire import error_reply

access_log = logging.getLogger("cotrt.server.access")

# These hold no data: a probe, and a page that asks for the key itself.
OPEN_PATHS = frozenset({"/health", "/"})
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")


class Guard:
    """ASGI middleware. ``scope["state"]`` gets ``request_id`` and ``owner``.

    The owner is a hash of the key that a request carries ("" on a server without keys), so that
    branches can belong to it; keys themselves are neither kept in a request nor logged.
    """

    def __init__(self, app: ASGIApp, options: ServerOptions) -> None:
        self._app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in options.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.monotonic()
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        given = next((value for name, value in headers if name == b"x-request-id"), b"")
        request_id = given.decode() if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
        status = 499  # nothing was answered: the client had gone

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message["headers"],
                    (b"x-request-id", request_id.encode()),
                ]
            await send(message)

        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        state["owner"] = ""
        try:
            if self._digests and scope["path"] not in OPEN_PATHS:
                owner = self._owner(headers)
                if owner is None:
                    refusal = ApiError(
                        401,
                        "no valid API key: send the header 'Authorization: Bearer KEY'",
                        code="invalid_api_key",
                        headers={"www-authenticate": "Bearer"},
                    )
                    await error_reply(refusal)(scope, receive, send_with_id)
                    return
                state["owner"] = owner
            await self._app(scope, receive, send_with_id)
        finally:
            seconds = round(time.monotonic() - started, 4)
            self._log(scope, request_id, status, seconds)

    def _owner(self, headers: list[tuple[bytes, bytes]]) -> str | None:
        """Hash of the key, or None. Every known key is compared, in constant time."""
        values = [value for name, value in headers if name == b"authorization"]
        scheme, _, key = (values[0] if len(values) == 1 else b"").partition(b" ")
        digest = hashlib.sha256(key).digest()
        known = False
        for each in self._digests:
            known |= hmac.compare_digest(digest, each)
        return digest.hex() if known and scheme == b"Bearer" else None

    @staticmethod
    def _log(scope: Scope, request_id: str, status: int, seconds: float) -> None:
        if access_log.isEnabledFor(logging.INFO):
            client = scope.get("client")
            entry = {
                "request_id": request_id,
                "client": client[0] if client else None,
                "method": scope["method"],
                "path": scope["path"][:200],
                "status": status,
                "seconds": seconds,
            }
            access_log.info(json.dumps(entry))
