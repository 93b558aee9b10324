"""Which path and method lead where, and what each is sent: read by the router and by OpenAPI."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from cotrt.server import branch_requests as sent
from cotrt.server import branches, chat_completions, completions, info, live, tokens
from cotrt.server.chat_request import ChatRequest
from cotrt.server.service import Service

Endpoint = Callable[[Request, Service], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Api:
    """One route.

    Attributes:
        method, path: as in HTTP; a name in braces stands for a part of the path.
        endpoint: what answers.
        body: what it is sent, or None.
        status: of its reply where all is well.
        is_open: it needs no key.
        media: type of its reply.
    """

    method: str
    path: str
    endpoint: Endpoint
    body: type[BaseModel] | None = None
    status: int = 200
    is_open: bool = False
    media: str = "application/json"


ROUTES = (
    Api("GET", "/", live.page, is_open=True, media="text/html"),
    Api("GET", "/health", info.health, is_open=True),
    Api("GET", "/version", info.version),
    Api("GET", "/metrics", info.metrics, media="text/plain"),
    Api("GET", "/openapi.json", live.openapi),
    Api("GET", "/v1/live", live.events, media="text/event-stream"),
    Api("GET", "/v1/models", info.list_models),
    Api("GET", "/v1/models/{name:path}", info.get_model),
    Api("POST", "/v1/completions", completions.create_completion, completions.CompletionRequest),
    Api("POST", "/v1/chat/completions", chat_completions.create_chat_completion, ChatRequest),
    Api("POST", "/tokenize", tokens.tokenize, tokens.TokenizeRequest),
    Api("POST", "/detokenize", tokens.detokenize, tokens.DetokenizeRequest),
    Api("GET", "/v1/branches", branches.list_branches),
    Api("POST", "/v1/branches", branches.create_branch, sent.CreateRequest, 201),
    Api("GET", "/v1/branches/{id}", branches.get_branch),
    Api("DELETE", "/v1/branches/{id}", branches.delete_branch),
    Api("POST", "/v1/branches/{id}/fork", branches.fork_branch, sent.ForkRequest, 201),
    Api("POST", "/v1/branches/{id}/extend", branches.extend_branch, sent.ExtendRequest),
    Api("POST", "/v1/branches/{id}/generate", branches.generate_branch, sent.GenerateRequest),
    Api("POST", "/v1/branches/{id}/score", branches.score_branch, sent.ScoreRequest),
    Api("POST", "/v1/branches/{id}/choose", branches.choose_branch, sent.ChooseRequest),
    Api("POST", "/v1/branches/{id}/truncate", branches.truncate_branch, sent.TruncateRequest),
    Api("POST", "/v1/branches/{id}/keep", branches.keep_branch, sent.KeepRequest),
)
