"""Chat templates: messages in, text out, in a sandbox with a bound on time and size.

A template sees plain data only, and runs in the sandbox of `template_sandbox`.

Contents may hold the spelling of special tokens. `render` can put a *guard*, one character that
no message holds, into each such spelling, so that the tokenizer can tell what the template wrote
from what somebody said (`Tokenizer.encode_chat`).
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import jinja2
from jinja2.exceptions import SecurityError

from ..errors import InvalidRequestError
from .template_sandbox import MAX_CPU_SECONDS, TemplateSandbox
from .tool_block import TemplateWords, with_calls_as_text, with_tools

# Names that a caller may not set through chat_template_kwargs.
RESERVED = frozenset(
    ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template")
)
_END = "\ue0ff"  # stands where the last message ends; a private-use character


@lru_cache(maxsize=32)
def _compile(template: str) -> jinja2.Template:
    return TemplateSandbox().from_string(template)


@lru_cache(maxsize=32)
def _words_of(template: str) -> TemplateWords:
    return TemplateWords(TemplateSandbox().parse(template))


def _with_tool_block(
    again: Callable[[Sequence[Mapping[str, Any]]], str],
    chat: list[dict[str, Any]],
    tools: list[Any],
) -> str:
    """Render tools where the template has no place of its own for them."""
    refused: InvalidRequestError | None = None
    for block, messages in with_tools(chat, tools):
        try:
            text = again(messages)
        except InvalidRequestError as error:  # no system messages, say
            refused = refused or error
            continue
        if block in text:
            return text
    if refused is not None:
        raise refused
    raise InvalidRequestError(
        "tools: the chat template has no place for tools, and shows neither system nor user "
        "messages whole: give another chat_template=",
        field="tools",
    )


def check(template: str) -> None:
    """Refuse what is not valid jinja, before there are messages to render.

    Raises:
        InvalidRequestError: says what is wrong with it.
    """
    try:
        _compile(template)
    except jinja2.TemplateError as error:
        raise InvalidRequestError(f"the chat template is not valid jinja: {error}") from error


def check_tools(tools: Any) -> None:
    """Refuse what is no list of tools.

    Raises:
        InvalidRequestError: says what it is.
    """
    if tools is not None and not isinstance(tools, (list, tuple)):
        raise InvalidRequestError(
            f"tools={tools!r:.80}: must be a list of tool definitions (dicts), or None"
        )


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    special_tokens: Mapping[str, str] | None = None,
    guarded: Sequence[str] = (),
    guard: str = "",
) -> str:
    """Render messages.

    Args:
        template: jinja source.
        messages: ``{"role", "content", ...}`` each; content a string, a list of text parts, or
            null.
        tools: JSON schemas that the template may show; none and an empty list are the same.
        variables: more names for the template (``chat_template_kwargs``).
        add_generation_prompt: end with the header of an assistant's message.
        continue_final_message: end inside the last message, which must be the assistant's; no
            generation prompt then.
        special_tokens: ``bos_token`` and the like.
        guarded: spellings that get ``guard`` after their first character wherever a message or
            tool holds them.
        guard: one character that no message holds.

    Raises:
        InvalidRequestError: a message of another form, a reserved variable, or a template that
            refuses the messages, fails, or takes too long.
    """
    check_tools(tools)
    if variables is not None and not isinstance(variables, Mapping):
        raise InvalidRequestError(
            f"chat_template_kwargs={variables!r:.80}: must be a dict of names for the template, or "
            "None"
        )
    variables = dict(variables or {})
    reserved = sorted(RESERVED & variables.keys())
    if reserved:
        raise InvalidRequestError(
            f"chat_template_kwargs may not set {', '.join(reserved)}; they have arguments of "
            "their own."
        )
    chat = normalise_messages(messages)
    if continue_final_message:
        if chat[-1].get("role") != "assistant":
            raise InvalidRequestError(
                "continue_final_message=True needs a last message of role 'assistant', got role "
                f"{chat[-1].get('role')!r}."
            )
        add_generation_prompt = False
    plain_tools = [_plain(tool) for tool in tools] if tools else None
    if guarded and guard:
        pattern = re.compile("|".join(map(re.escape, sorted(guarded, key=len, reverse=True))))
        chat = _guard(chat, pattern, guard)
        plain_tools = _guard(plain_tools, pattern, guard)
    check(template)
    compiled = _compile(template)
    words = _words_of(template)
    chat = with_calls_as_text(words, chat)
    if plain_tools and not words.shows_tools:
        again = functools.partial(
            render,
            template,
            variables=variables,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            special_tokens=special_tokens,
        )
        return _with_tool_block(again, chat, plain_tools)
    if continue_final_message:
        chat[-1]["content"] += _END
    budget = compiled.environment.budget  # type: ignore[attr-defined]
    names = {**(special_tokens or {}), **{k: _plain(v) for k, v in variables.items()}}
    try:
        budget.deadline = time.thread_time() + MAX_CPU_SECONDS
        text = compiled.render(
            messages=chat,
            tools=plain_tools,
            add_generation_prompt=add_generation_prompt,
            **{"documents": None, **names},
        )
    except (jinja2.TemplateError, SecurityError) as error:
        raise InvalidRequestError(f"the chat template refused the messages: {error}") from error
    except (
        TypeError, ValueError, AttributeError, LookupError, ZeroDivisionError
    ) as error:  # fmt: skip
        raise InvalidRequestError(f"the chat template failed: {error!r}") from error
    except (RecursionError, OverflowError, ArithmeticError, MemoryError) as error:
        raise InvalidRequestError(f"the chat template ran out of bounds: {error!r}") from error
    return _cut_at_end(text) if continue_final_message else text


def _cut_at_end(text: str) -> str:
    end = text.rfind(_END)
    if end < 0:
        raise InvalidRequestError(
            "continue_final_message=True: the chat template leaves the last message out."
        )
    return text[:end]


def normalise_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as plain data with string contents; the caller's own are not changed.

    Raises:
        InvalidRequestError: no messages, or one of another form.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InvalidRequestError(
            "messages must be a list of {'role', 'content'} dicts, got "
            f"{type(messages).__name__}."
        )
    if not messages:
        raise InvalidRequestError("messages is empty; give at least one.")
    out = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidRequestError(
                f"messages[{index}] must be a dict with 'role' and 'content', got "
                f"{type(message).__name__}."
            )
        if not isinstance(message.get("role"), str):
            raise InvalidRequestError(
                f"messages[{index}] needs a 'role' string, got {message.get('role')!r}."
            )
        # Keys without a value are left out: templates test for presence. An empty list says the
        # same as none: clients write "tool_calls": [] beside a reply that called nothing.
        kept = {k: _plain(v) for k, v in message.items() if not _says_nothing(v)}
        kept["content"] = _text(message.get("content"), index)
        out.append(kept)
    return out


def _says_nothing(value: Any) -> bool:
    return value is None or (isinstance(value, (list, tuple, Mapping)) and not value)


def _text(content: Any, index: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence) and not isinstance(content, (bytes, bytearray)):
        texts = []
        for part in content:
            if not isinstance(part, Mapping) or part.get("type") != "text":
                kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
                raise InvalidRequestError(
                    f"messages[{index}].content has a part of type {kind!r}; only text parts are "
                    "supported."
                )
            if not isinstance(part.get("text"), str):
                raise InvalidRequestError(
                    f"messages[{index}].content has a text part without text."
                )
            texts.append(part["text"])
        return "".join(texts)
    raise InvalidRequestError(
        f"messages[{index}].content must be a string, a list of text parts or null, got "
        f"{type(content).__name__}."
    )


def _plain(value: Any) -> Any:
    """Plain JSON data: a template must not meet objects with methods."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    for base in (str, bool, int, float):
        if isinstance(value, base):
            return base(value)
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    dump = getattr(value, "model_dump", None)
    if callable(dump):
        return _plain(dump())
    raise InvalidRequestError(
        f"a {type(value).__name__} cannot be shown to a chat template; give plain JSON data."
    )


def _guard(value: Any, pattern: re.Pattern[str], guard: str) -> Any:
    if isinstance(value, str):
        return pattern.sub(lambda match: match[0][0] + guard + match[0][1:], value)
    if isinstance(value, dict):
        return {key: _guard(item, pattern, guard) for key, item in value.items()}
    if isinstance(value, list):
        return [_guard(item, pattern, guard) for item in value]
    return value
