"""The live page, its events, and the OpenAPI document."""

from __future__ import annotations

import base64
import hashlib
from functools import lru_cache
from importlib import resources

import anyio
from starlette.requests import Request
from starlette.responses import Response

from cotrt.server.errors import ApiError
from cotrt.server.live_view import LiveView
from cotrt.server.openapi import document
from cotrt.server.service import Service
from cotrt.server.wire import Emit, EventStream, Reply

# Seconds between two looks at the engine.
_INTERVAL_S = 0.2
_MAX_VIEWERS = 32


async def openapi(request: Request, service: Service) -> Response:
    """This interface, as OpenAPI 3.1."""
    from cotrt.server.routes import ROUTES

    return Reply(document(ROUTES, has_keys=bool(service.options.api_keys)))


async def page(request: Request, service: Service) -> Response:
    """The live page. It holds no data: it asks for the key, and reads its events with it."""
    html, policy = _page()
    headers = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
    }
    return Response(html, media_type="text/html; charset=utf-8", headers=headers)


async def events(request: Request, service: Service) -> Response:
    """Server-sent events for the live page: changes of branches, blocks and numbers."""
    if service.num_viewers >= _MAX_VIEWERS:
        raise ApiError(
            429,
            f"{_MAX_VIEWERS} live pages are open: close one",
            code="too_many_viewers",
            headers={"retry-after": "5"},
        )
    service.num_viewers += 1
    view = LiveView(service, request.scope["state"]["owner"])

    async def produce(emit: Emit) -> None:
        while not service.admission.is_draining:
            changes = await service.in_thread(view.changes)
            if changes:
                await emit(changes)
            await anyio.sleep(_INTERVAL_S)

    def cleanup() -> None:
        service.num_viewers -= 1

    timeout = service.options.write_timeout_s
    return EventStream(produce, cleanup=cleanup, write_timeout_s=timeout, done=False)


@lru_cache(maxsize=1)
def _page() -> tuple[str, str]:
    """The page in one piece, and a policy that lets its own script and style run and no other."""
    folder = resources.files("cotrt.server").joinpath("page")
    parts = {
        name: folder.joinpath(name).read_text(encoding="utf-8")
        for name in ("index.html", "page.css", "page.js")
    }
    html = parts["index.html"]
    html = html.replace("/*style*/", parts["page.css"]).replace("/*script*/", parts["page.js"])
    policy = (
        f"default-src 'none'; connect-src 'self'; script-src {_hash(parts['page.js'])}; "
        f"style-src {_hash(parts['page.css'])}; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    )
    return html, policy


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
