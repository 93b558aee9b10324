"""`POST /tokenize` and `POST /detokenize`, as vLLM has them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from cotrt.server.chat_request import ChatRequest, Message, Tool
from cotrt.server.errors import ApiError
from cotrt.server.sampling_fields import RequestModel, TokenId
from cotrt.server.service import Service
from cotrt.server.wire import Reply, read_model


class TokenizeRequest(RequestModel):
    """A text, or messages that the chat template renders; one of them."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool = False


class DetokenizeRequest(RequestModel):
    """Token ids; with ``before`` the text as it follows those, of which the last 24 are enough."""

    model: str | None = None
    skip_special_tokens: bool = False
    before: Annotated[list[TokenId], Field(max_length=1 << 20)] | None = None
    tokens: Annotated[list[TokenId], Field(max_length=1 << 20)]


async def tokenize(request: Request, service: Service) -> Response:
    """Ids of a text or of messages."""
    asked = await read_model(request, service.options, TokenizeRequest)
    service.check_model(asked.model)
    if (asked.prompt is None) == (asked.messages is None):
        raise ApiError(400, "give either prompt or messages", param="prompt")
    tokenizer = service.runtime._need_tokenizer()
    if asked.messages is not None:
        chat = ChatRequest(
            messages=asked.messages,
            tools=asked.tools,
            chat_template_kwargs=asked.chat_template_kwargs,
            add_generation_prompt=asked.add_generation_prompt,
            continue_final_message=asked.continue_final_message,
        )
        ids = await service.encode(service.runtime.encode_chat, **chat.rendering())
    else:
        ids = await service.encode(
            tokenizer.encode, asked.prompt, add_special_tokens=asked.add_special_tokens
        )
    reply = {"count": len(ids), "max_model_len": service.runtime.max_model_len, "tokens": list(ids)}
    if asked.return_token_strs:
        reply["token_strs"] = [tokenizer.token_text(i) for i in ids]
    return Reply(reply)


async def detokenize(request: Request, service: Service) -> Response:
    """Text of ids."""
    asked = await read_model(request, service.options, DetokenizeRequest)
    service.check_model(asked.model)
    runtime = service.runtime
    ids, before = runtime.check_ids(asked.tokens), runtime.check_ids(asked.before or ())
    text = await service.encode(
        runtime.decode, ids, before, skip_special_tokens=asked.skip_special_tokens
    )
    return Reply({"prompt": text})
