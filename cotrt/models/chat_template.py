"""Chat templates: messages in, text out, in a sandbox with a bound on time and size.

A template is a program by whoever made the model. It sees plain data only, runs in jinja's
immutable sandbox, and every loop round and macro call of it is counted against a budget of CPU
time; products and powers are bounded, so that one expression cannot fill the memory.

Contents may hold the spelling of special tokens. `render` can put a *guard*, one character that
no message holds, into each such spelling, so that the tokenizer can tell what the template wrote
from what somebody said (`Tokenizer.encode_chat`).
"""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.nodes as nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from ..errors import InvalidRequestError
from .tool_block import TemplateWords, with_calls_as_text, with_tools

MAX_CPU_SECONDS = 0.5
MAX_CHARACTERS = 16_000_000
# Names that a caller may not set through chat_template_kwargs.
RESERVED = frozenset(
    ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template")
)
_WIDTH = re.compile(r"[%{:.][^}%]*?\d{7}")
_END = "\ue0ff"  # stands where the last message ends; a private-use character


class _Budget(threading.local):
    """CPU time of each rendering thread; other threads' load does not count."""

    deadline = float("inf")

    def tick(self) -> str:
        if time.thread_time() > self.deadline:
            raise SecurityError(f"the template ran for more than {MAX_CPU_SECONDS} s")
        return ""

    def counted(self, items: Any) -> Any:
        """``items``, each round of a loop over them counted."""
        return _Counted(items, self)


class _Counted:
    def __init__(self, items: Any, budget: _Budget) -> None:
        self._items, self._budget = items, budget

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            self._budget.tick()
            yield item


class _Environment(ImmutableSandboxedEnvironment):
    """jinja's sandbox, with the budget woven into loops and macros."""

    intercepted_binops = frozenset(("*", "**", "+", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        self.budget = _Budget()
        self.filters["tojson"] = _tojson
        self.filters["_counted"] = self.budget.counted
        self.filters["_joined"] = _joined
        for name in ("center", "format", "indent", "wordwrap"):
            self.filters[name] = _checked(self.filters[name])
        self.globals["_tick"] = self.budget.tick
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self.globals.pop("lipsum", None)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = _Weaver().visit(super()._parse(source, name, filename))
        assert isinstance(tree, nodes.Template)
        tree.set_environment(self)
        for node in tree.find_all(nodes.Node):
            node.lineno = node.lineno or 1
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if _result_size(operator, left, right) > MAX_CHARACTERS:
            raise SecurityError(f"the result of {operator!r} is too large for a template")
        if operator == "%" and isinstance(left, str):
            _check_widths(left)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Any:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_widths(str(value.__self__))
        return wrapped

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Bound what a text's own methods (``center``, ``format``, ``replace``) can make."""
        text = getattr(function, "__self__", None)
        if isinstance(text, str):
            _check_widths(text, *args, *kwargs.values())
            if getattr(function, "__name__", "") == "replace" and len(args) > 1:
                grown = len(text) + text.count(str(args[0])) * len(str(args[1]))
                if grown > MAX_CHARACTERS:
                    raise SecurityError("a text this long is not allowed in a template")
        return super().call(context, function, *args, **kwargs)

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        return _joined(parts)


class _Weaver(NodeTransformer):
    """Puts the budget into a parsed template: loops and macros count, ``a ~ b`` is bounded."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "_counted", [], [], None, None)
        if node.recursive:  # calls of loop(...) go past the wrapped items
            node.body.insert(0, self._tick())
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:  # noqa: N802
        self.generic_visit(node)
        node.body.insert(0, self._tick())
        return node

    @staticmethod
    def _tick() -> nodes.Output:
        return nodes.Output([nodes.Call(nodes.Name("_tick", "load"), [], [], None, None)])

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # noqa: N802
        self.generic_visit(node)
        return nodes.Filter(nodes.List(node.nodes), "_joined", [], [], None, None)


class _Generation(Extension):
    """``{% generation %}`` marks what the assistant said, for training; here it is plain text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _result_size(operator: str, left: Any, right: Any) -> int:
    """Characters or items that an operator would make; for integers 1000 a bit."""
    sized = (str, list, tuple)
    numbers = isinstance(left, int) and isinstance(right, int)
    if operator == "+":
        return len(left) + len(right) if isinstance(left, sized) and isinstance(right, sized) else 0
    if operator == "**":
        return 1000 * left.bit_length() * right if numbers else 0
    if numbers:
        return 1000 * int(left.bit_length() + right.bit_length())
    if isinstance(left, sized) and isinstance(right, int):
        return len(left) * right
    return left * len(right) if isinstance(left, int) and isinstance(right, sized) else 0


def _check_widths(text: str, *args: Any) -> None:
    """Refuse a padding or a format's width of more than a million characters."""
    wide = any(isinstance(value, int) and value > 1_000_000 for value in args)
    if wide or (("{" in text or "%" in text) and _WIDTH.search(text)):
        raise SecurityError("a width this large is not allowed in a template")


def _checked(function: Any) -> Any:
    """A filter that takes widths (``center``, ``indent``, ``format``), bounded."""

    @functools.wraps(function)
    def bounded(text: Any, *args: Any, **kwargs: Any) -> Any:
        _check_widths(str(text), *args, *kwargs.values())
        return function(text, *args, **kwargs)

    return bounded


def _joined(parts: Iterable[Any]) -> str:
    kept, size = [], 0
    for part in parts:
        text = str(part)
        size += len(text)
        if size > MAX_CHARACTERS:
            raise SecurityError(f"the template made more than {MAX_CHARACTERS} characters")
        kept.append(text)
    return "".join(kept)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own escapes HTML, which models were not trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


@lru_cache(maxsize=32)
def _compile(template: str) -> jinja2.Template:
    return _Environment().from_string(template)


@lru_cache(maxsize=32)
def _words_of(template: str) -> TemplateWords:
    return TemplateWords(_Environment().parse(template))


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
        tools: JSON schemas that the template may show.
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
    plain_tools = None if tools is None else [_plain(tool) for tool in tools]
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
        # Keys without a value are left out: templates test for presence.
        kept = {k: _plain(v) for k, v in message.items() if v is not None}
        kept["content"] = _text(message.get("content"), index)
        out.append(kept)
    return out


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
