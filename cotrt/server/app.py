"""The ASGI application over one engine."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from cotrt.errors import BranchBusyError, BranchPrunedError
from cotrt.program.llm import LLM
from cotrt.server.errors import ApiError, to_api_error
from cotrt.server.guard import Guard
from cotrt.server.options import ServerOptions
from cotrt.server.routes import ROUTES, Endpoint
from cotrt.server.service import Service
from cotrt.server.wire import ClientGoneError, error_reply

# Leases are looked at so often.
_SWEEP_S = 1.0


def build_app(llm: LLM, options: ServerOptions | None = None) -> ASGIApp:
    """The application; the caller closes the LLM after it.

    Args:
        llm: what answers.
        options: limits, keys and names.
    """
    return app_of(Service(llm, options or ServerOptions()))


def app_of(service: Service) -> ASGIApp:
    """The application of a service."""
    options = service.options

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with anyio.create_task_group() as group:
            group.start_soon(_sweep, service)
            yield
            group.cancel_scope.cancel()
        service.branches.prune_all()

    # One route a path, so that a 405 can name all methods that the path has.
    paths: dict[str, dict[str, Endpoint]] = {}
    for api in ROUTES:
        paths.setdefault(api.path, {})[api.method] = api.endpoint
    routes = [
        Route(path, _safely(endpoints, service), methods=list(endpoints))
        for path, endpoints in paths.items()
    ]
    app = Starlette(
        routes=routes, lifespan=lifespan, exception_handlers={HTTPException: _http_error}
    )
    app.router.redirect_slashes = False
    guarded: ASGIApp = Guard(app, options)
    if options.allowed_origins:
        from starlette.middleware.cors import CORSMiddleware

        guarded = CORSMiddleware(
            guarded,
            allow_origins=list(options.allowed_origins),
            allow_methods=["GET", "POST", "DELETE"],
            # Those that a preflight asks for: clients in browsers send headers of their own.
            allow_headers=["*"],
        )
    return guarded


async def _sweep(service: Service) -> None:
    while True:
        await anyio.sleep(_SWEEP_S)
        service.branches.end_expired()


def _safely(
    endpoints: Mapping[str, Endpoint], service: Service
) -> Callable[[Request], Awaitable[Response]]:
    """A path's endpoints by method, whose every exception becomes a reply."""

    async def answer(request: Request) -> Response:
        method = "GET" if request.method == "HEAD" else request.method
        try:
            return await endpoints[method](request, service)
        except (ClientGoneError, ClientDisconnect):
            return Response(status_code=499)  # nobody reads it
        except (BranchBusyError, BranchPrunedError) as error:
            told = to_api_error(error)
            owner = request.scope["state"]["owner"]
            told.message = service.branches.with_ids(told.message, owner)
            return error_reply(told)
        except Exception as error:
            return error_reply(error)

    return answer


def _http_error(request: Request, error: Exception) -> Response:
    """What the router refuses: an unknown path, or a method that the path does not have."""
    assert isinstance(error, HTTPException)
    path = request.url.path[:200]
    if error.status_code == 404:
        told = ApiError(404, f"there is no route {path!r}", code="not_found")
    elif error.status_code == 405:
        told = ApiError(
            405,
            f"{request.method} is not allowed on {path!r}",
            code="method_not_allowed",
            headers=error.headers,
        )
    else:
        told = ApiError(error.status_code, str(error.detail))
    return error_reply(told)
