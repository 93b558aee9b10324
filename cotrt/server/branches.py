"""`/v1/branches`: the tree for programs in other processes.

The verbs are those of `cotrt.Branch`, the JSON is that of its results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from cotrt.errors import BranchPrunedError, NumericsError
from cotrt.outputs import Choice, CompletionOutput, Score
from cotrt.program.handle import Handle
from cotrt.server.branch_requests import (
    ChooseRequest,
    CreateRequest,
    ExtendRequest,
    ForkRequest,
    GenerateRequest,
    KeepRequest,
    LeaseFields,
    ScoreRequest,
    TruncateRequest,
)
from cotrt.server.branch_table import Lease
from cotrt.server.chat_request import ChatRequest
from cotrt.server.errors import ApiError, blaming, to_api_error
from cotrt.server.outputs import finish_reason, read_pieces
from cotrt.server.service import Service
from cotrt.server.wire import Emit, EventStream, Reply, read_model, while_connected

M = TypeVar("M", bound=LeaseFields | GenerateRequest)
T = TypeVar("T")


async def create_branch(request: Request, service: Service) -> Response:
    """A root."""
    asked = await read_model(request, service.options, CreateRequest)
    service.check_model(asked.model)
    if asked.prompt is not None and asked.messages is not None:
        raise ApiError(400, "give either prompt or messages", param="prompt")
    ttl, owner = service.branches.check_ttl(asked.ttl), _owner(request)
    service.admission.check(1)
    service.branches.check_room(owner, 1)
    prompt: Any = "" if asked.prompt is None else asked.prompt
    if asked.messages is not None:
        chat = ChatRequest(messages=asked.messages, tools=asked.tools)
        prompt = await service.encode(service.runtime.encode_chat, **chat.rendering())
    branch = await service.encode(service.llm.branch, prompt)
    try:
        service.branches.check_room(owner, 1)  # others may have come meanwhile
    except ApiError:
        branch.prune()
        raise
    lease = service.branches.add([branch], owner, ttl)[0]
    return Reply(service.branches.describe(lease), 201)


async def list_branches(request: Request, service: Service) -> Response:
    """The caller's branches, without their tokens."""
    table = service.branches
    data = [table.describe(lease) for lease in table.owned(_owner(request))]
    return Reply({"object": "list", "data": data})


async def get_branch(request: Request, service: Service) -> Response:
    """One branch with its tokens and text; with ``?full=false`` without them."""
    full = _flag(request, "full")
    lease = _find(request, service)
    return Reply(await service.in_thread(service.branches.describe, lease, full=full))


async def delete_branch(request: Request, service: Service) -> Response:
    """Prune: the branch and everything grown from it. With ``?prune=false`` only close it."""
    prune = _flag(request, "prune")
    lease = _find(request, service)
    if prune:
        service.branches.prune(lease)
    else:
        service.branches.close(lease)
    return Reply({"id": lease.id, "object": "branch", "deleted": True})


async def fork_branch(request: Request, service: Service) -> Response:
    """Children that share all KV."""
    asked, lease = await _read(request, service, ForkRequest)
    service.branches.check_room(lease.owner, asked.n)
    children = lease.branch.fork(asked.n, at=asked.at)
    made = service.branches.add(children, lease.owner, lease.ttl)
    data = [service.branches.describe(child) for child in made]
    return Reply({"object": "list", "data": data}, 201)


async def extend_branch(request: Request, service: Service) -> Response:
    """Append forced tokens."""
    asked, lease = await _read(request, service, ExtendRequest)
    if (asked.text is None) == (asked.token_ids is None):
        raise ApiError(400, "give either text or token_ids", param="text")
    what: Any = asked.token_ids if asked.text is None else asked.text
    await service.encode(lease.branch.extend, what, special=asked.special)
    return Reply(service.branches.describe(lease))


async def truncate_branch(request: Request, service: Service) -> Response:
    """Roll back."""
    asked, lease = await _read(request, service, TruncateRequest)
    lease.branch.truncate(asked.length, same_draws=asked.same_draws)
    return Reply(service.branches.describe(lease))


async def keep_branch(request: Request, service: Service) -> Response:
    """Evict its KV last for a time, and let it live on at least so long."""
    asked, lease = await _read(request, service, KeepRequest)
    if asked.seconds is not None:
        service.branches.keep(lease, asked.seconds)
    return Reply(service.branches.describe(lease))


async def generate_branch(request: Request, service: Service) -> Response:
    """Sample; the branch grows by every sampled token."""
    asked, lease = await _read(request, service, GenerateRequest)
    with blaming(asked.names):
        params = await service.params_of(asked.fields(service))
    ticket = service.admission.take(1)
    try:
        with blaming(asked.names):
            generation = lease.branch.generate(params)
    except BaseException:
        ticket.release()
        raise

    def cleanup() -> None:
        generation.cancel()
        ticket.release()
        service.metrics.observe([generation._state])
        service.branches.renew(lease)

    async def stream(emit: Emit) -> None:
        with _errors_have_output(), blaming(asked.names):
            async for piece in read_pieces(generation):
                event: dict[str, Any] = {
                    "text": piece.text,
                    "token_ids": piece.token_ids,
                    "token_logprobs": [_finite(value) for value in piece.logprobs],
                }
                if params.logprobs is not None:
                    event["logprobs"] = [_scores_json(each) for each in piece.scores]
                if piece.finish_reason is not None:
                    finish_reason(piece.finish_reason)
                    event["output"] = _completion_json(generation.result())
                await emit(event)

    if asked.stream:
        timeout = service.options.write_timeout_s
        return EventStream(stream, cleanup=cleanup, write_timeout_s=timeout)
    try:
        with _errors_have_output(), blaming(asked.names):
            output = await while_connected(request.receive, lambda: _result(generation))
        finish_reason(output.finish_reason)
        return Reply(_completion_json(output))
    finally:
        cleanup()


async def score_branch(request: Request, service: Service) -> Response:
    """Log-probability of continuations; the branch is unchanged."""
    asked, lease = await _read(request, service, ScoreRequest)
    given = asked.continuations
    is_one = isinstance(given, str) or isinstance(given[0], int)
    scored = await _wait(
        request,
        service,
        lambda: lease.branch.score(given, given=asked.given),
        1 if is_one else len(given),
    )
    if isinstance(scored, Score):
        return Reply(_score_json(scored))
    return Reply({"object": "list", "data": [_score_json(score) for score in scored]})


async def choose_branch(request: Request, service: Service) -> Response:
    """Score options and append the best."""
    asked, lease = await _read(request, service, ChooseRequest)
    choice: Choice = await _wait(
        request,
        service,
        lambda: lease.branch.choose(asked.options, given=asked.given, normalize=asked.normalize),
        len(asked.options),
    )
    scores = [_score_json(score) for score in choice.scores]
    return Reply({"index": choice.index, "option": choice.option, "scores": scores})


# ---- inside -----------------------------------------------------------------------------------


def _owner(request: Request) -> str:
    owner: str = request.scope["state"]["owner"]
    return owner


def _flag(request: Request, name: str) -> bool:
    value = request.query_params.get(name, "true")
    if value not in ("true", "false"):
        raise ApiError(400, f"{name}={value[:40]!r}: must be true or false", param=name)
    return value == "true"


def _find(request: Request, service: Service) -> Lease:
    return service.branches.find(request.path_params["id"], _owner(request))


async def _read(request: Request, service: Service, model: type[M]) -> tuple[M, Lease]:
    lease = _find(request, service)
    asked = await read_model(request, service.options, model)
    lease = _find(request, service)  # it may have gone while the body came
    if asked.ttl is not None:
        lease.ttl = service.branches.check_ttl(asked.ttl)
        service.branches.renew(lease)
    return asked, lease


async def _wait(
    request: Request, service: Service, start: Callable[[], Handle[T]], num_outputs: int
) -> T:
    """Start work in a thread (it tokenizes), and wait for it while the client is there."""
    with service.admission.admit(num_outputs):
        handle = await service.encode(start)
        try:
            return await while_connected(request.receive, lambda: _result(handle))
        finally:
            handle.cancel()


async def _result(handle: Handle[T]) -> T:
    return await handle


@contextmanager
def _errors_have_output() -> Iterator[None]:
    """Errors that carry what was made before them tell the client of it."""
    try:
        yield
    except (BranchPrunedError, NumericsError) as error:
        told = to_api_error(error)
        if error.output is not None:
            told.output = _completion_json(error.output)
        raise told from error


def _completion_json(output: CompletionOutput) -> dict[str, Any]:
    logprobs = None
    if output.logprobs is not None:
        logprobs = [_scores_json(each) for each in output.logprobs]
    return {
        "index": output.index,
        "text": output.text,
        "token_ids": output.token_ids,
        "cumulative_logprob": _finite(output.cumulative_logprob),
        "logprobs": logprobs,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
    }


def _scores_json(entries: Mapping[int, Any]) -> dict[str, Any]:
    found = {str(token): asdict(entry) for token, entry in entries.items()}
    for entry in found.values():
        entry["logprob"] = _finite(entry["logprob"])
    return found


def _score_json(score: Score) -> dict[str, Any]:
    logprobs = [_finite(value) for value in score.logprobs]
    return {
        "token_ids": score.token_ids,
        "logprobs": logprobs,
        "total": sum(logprobs),
        "mean": sum(logprobs) / len(logprobs),
    }


def _finite(value: float) -> float:
    return max(float(value), -1e9)
