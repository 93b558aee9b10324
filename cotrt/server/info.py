"""What the server is and how it does: models, health, version, metrics."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response

from cotrt import __version__
from cotrt.server.errors import ApiError
from cotrt.server.service import Service
from cotrt.server.wire import Reply

_STARTED = int(time.time())


async def list_models(request: Request, service: Service) -> Response:
    """All names of the model."""
    return Reply({"object": "list", "data": [_model(service, name) for name in service.names]})


async def get_model(request: Request, service: Service) -> Response:
    """One name of the model."""
    name = request.path_params["name"]
    service.check_model(name)
    return Reply(_model(service, name))


def _model(service: Service, name: str) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "cotrt",
        "root": service.names[0],
        "parent": None,
        "max_model_len": service.runtime.max_model_len,
    }


async def health(request: Request, service: Service) -> Response:
    """200 while the engine lives, 503 after it died or while the server shuts down."""
    service.runtime.check()
    if service.admission.is_draining:
        raise ApiError(503, "the server is shutting down", code="shutting_down")
    return Reply({"status": "ok"})


async def version(request: Request, service: Service) -> Response:
    """The version of cotrt."""
    return Reply({"version": __version__})


async def metrics(request: Request, service: Service) -> Response:
    """Counters for prometheus."""
    text = await service.in_thread(service.metrics.text)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")
