"""The live page, its events, and the OpenAPI document."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from cotrt.server.openapi import document
from cotrt.server.service import Service
from cotrt.server.wire import Reply


async def openapi(request: Request, service: Service) -> Response:
    """This interface, as OpenAPI 3.1."""
    from cotrt.server.routes import ROUTES

    return Reply(document(ROUTES, has_keys=bool(service.options.api_keys)))


async def page(request: Request, service: Service) -> Response:
    """The live page. It holds no data."""
    return Response("<!doctype html>", media_type="text/html")


async def events(request: Request, service: Service) -> Response:
    """Server-sent events for the live page."""
    return Reply({})
