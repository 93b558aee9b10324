"""What `POST /v1/chat/completions` is sent, and what it means."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.json_schema import SkipJsonSchema

from cotrt.options.sampling import MAX_LOGPROBS
from cotrt.server.errors import ApiError
from cotrt.server.openai_fields import OpenAIFields
from cotrt.server.options import ServerOptions
from cotrt.server.sampling_fields import NumTokens, RequestModel
from cotrt.server.structured import tool_grammar


class TextPart(RequestModel):
    """A part of a message's content; only text is served."""

    type: Literal["text"]
    text: str


def _only_text(content: Any) -> Any:
    """Parts that are no text are refused by name; the rest is left to the type."""
    for part in content if isinstance(content, list) else ():
        if isinstance(part, dict) and part.get("type", "text") != "text":
            raise ValueError(
                f"a part of type {str(part['type'])[:80]!r}; only text parts are supported"
            )
    return content


class Message(BaseModel):
    """A message. Fields beyond these are passed on to the chat template."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Annotated[str | list[TextPart] | None, BeforeValidator(_only_text)] = None
    tool_calls: list[dict[str, Any]] | None = None


class ToolFunction(RequestModel):
    """A function that the model may call."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(RequestModel):
    """A tool that the template shows to the model."""

    type: Literal["function"]
    function: ToolFunction


class NamedFunction(RequestModel):
    """The function that must be called."""

    name: Annotated[str, Field(min_length=1, max_length=256)]


class NamedTool(RequestModel):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class ChatRequest(OpenAIFields):
    """A chat completion. Without ``max_tokens`` the reply may fill the context.

    ``max_completion_tokens`` wins over ``max_tokens``. ``chat_template`` is refused: the server
    renders its model's own template only.
    """

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: NumTokens | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(max_length=256)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool = True
    modalities: list[Literal["text"]] | None = None
    reasoning_effort: Annotated[str, Field(max_length=64)] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: SkipJsonSchema[Any] = None  # to be refused with more than its name
    chat_template_kwargs: dict[str, Any] | None = None
    branch_id: str | None = None

    def check(self) -> None:
        """What the types cannot say.

        Raises:
            ApiError: fields that do not go together, or are not in this version.
        """
        if self.chat_template is not None:
            raise ApiError(
                400,
                "chat_template: a request cannot bring a template; it is the server's to choose",
                param="chat_template",
            )
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
        if self.branch_id is not None and self.n != 1:
            raise ApiError(400, f"n={self.n} with branch_id: fork the branch instead", param="n")

    def sampling(
        self, options: ServerOptions, tool_style: str | None, added_tokens: Mapping[str, int]
    ) -> dict[str, Any]:
        """Fields for `SamplingParams`; no max_tokens is no limit.

        A ``tool_choice`` that forces a call is a grammar.

        Raises:
            ApiError: more than the server takes.
        """
        limit = self.max_completion_tokens
        if limit is None:
            limit = self.max_tokens
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        fields = self.overrides(options)
        fields.update(n=self.n, max_tokens=limit, logprobs=logprobs)
        fields["structured_outputs"] = self.grammar(options.max_text_chars)
        if self.forces_call:
            if fields["structured_outputs"] is not None:
                raise ApiError(
                    400,
                    f"tool_choice: a forced tool call leaves no room for {self.grammar_field}",
                    param="tool_choice",
                )
            tools = self._forced_tools()
            fields["structured_outputs"] = tool_grammar(tool_style, tools, added_tokens)
        return fields

    @property
    def forces_call(self) -> bool:
        """A tool must be called."""
        return self.tool_choice not in (None, "none", "auto")

    @property
    def names(self) -> dict[str, str]:
        """The request's own names for what errors blame by another; "": what it asks about."""
        grammar = self.grammar_field
        if self.forces_call:
            grammar = "tools"
        limit = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return {"structured_outputs": grammar, "max_tokens": limit, "": "messages"}

    @property
    def wants_no_thought(self) -> bool:
        """Thinking is turned off, by the names that templates know."""
        given = self.chat_template_kwargs or {}
        off = any(given.get(name) is False for name in ("enable_thinking", "thinking"))
        return off or self.reasoning_effort == "none"

    def _forced_tools(self) -> list[dict[str, Any]]:
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools or ()]
        if not tools:
            raise ApiError(
                400,
                "tool_choice: a call is asked for and the request has no tools: give tools, or "
                "leave tool_choice out",
                param="tools",
            )
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            tools = [tool for tool in tools if tool["function"]["name"] == name]
        if not tools:
            raise ApiError(
                400, "tool_choice: there is no such tool among tools", param="tool_choice"
            )
        return tools

    @property
    def tool_names(self) -> frozenset[str]:
        """Names of the tools that may be called."""
        if self.tool_choice == "none":
            return frozenset()
        return frozenset(tool.function.name for tool in self.tools or ())

    def rendering(self) -> dict[str, Any]:
        """Arguments for the tokenizer's ``encode_chat``.

        Raises:
            ApiError: arguments of a tool call that are no JSON.
        """
        kwargs = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            kwargs.setdefault("reasoning_effort", self.reasoning_effort)
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools or ()]
        return {
            "messages": [_for_template(message) for message in self.messages],
            "tools": tools if tools and self.tool_choice != "none" else None,
            "chat_template_kwargs": kwargs,
            "add_generation_prompt": self.add_generation_prompt and not self.continue_final_message,
            "continue_final_message": self.continue_final_message,
        }


def _for_template(message: Message) -> dict[str, Any]:
    """A message as templates know it: arguments of calls as data, developers as the system."""
    given = message.model_dump(exclude_none=True)
    if given["role"] == "developer":
        given["role"] = "system"
    if message.tool_calls is not None:
        given["tool_calls"] = [_call_for_template(call) for call in message.tool_calls]
    return given


def _call_for_template(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return dict(call)
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        # What the model wrote may be no JSON; the template then shows it as it is.
        arguments = function["arguments"]
    return {**call, "function": {**function, "arguments": arguments}}
