"""The sandbox that chat templates run in: jinja's own, with a bound on time and size.

A template is a program by whoever made the model. It runs in jinja's immutable sandbox; every loop
round and macro call of it is counted against a budget of CPU time, and what one expression can make
is bounded (`template_bounds`), so that it cannot fill the memory.
"""

from __future__ import annotations

import functools
import json
import threading
import time
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any

import jinja2
import jinja2.nodes as nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from .template_bounds import (
    MAX_CHARACTERS,
    MAX_JSON_INDENT,
    BoundedFormatter,
    check_filter,
    check_method,
    check_percent,
    operator_size,
)

MAX_CPU_SECONDS = 0.5


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


class TemplateSandbox(ImmutableSandboxedEnvironment):
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
        for name in ("center", "format", "indent", "join", "replace"):
            self.filters[name] = _checked(name, self.filters[name])
        self.globals["_tick"] = self.budget.tick
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals.pop("lipsum", None)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = _Weaver().visit(super()._parse(source, name, filename))
        assert isinstance(tree, nodes.Template)
        tree.set_environment(self)
        for node in tree.find_all(nodes.Node):
            node.lineno = node.lineno or 1
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator_size(operator, left, right) > MAX_CHARACTERS:
            raise SecurityError(f"the result of {operator!r} is too large for a template")
        if operator == "%" and isinstance(left, str):
            check_percent(left, right)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Any:
        """``text.format`` and ``text.format_map`` as bounded functions; None for all else."""
        if super().wrap_str_format(value) is None:
            return None
        form = str(value.__self__)

        def bounded(*args: Any, **kwargs: Any) -> str:
            if value.__name__ == "format_map":
                (mapping,) = args
                return BoundedFormatter(self).vformat(form, (), mapping)
            return BoundedFormatter(self).vformat(form, args, kwargs)

        return bounded

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Bound what a text's own methods (``center``, ``replace``) can make."""
        check_method(function, args, kwargs)
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


def _checked(name: str, function: Any) -> Any:
    """A filter whose result grows with its arguments, bounded."""
    num_own = int(hasattr(function, "jinja_pass_arg"))  # it gets jinja's own state first

    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        if len(args) > num_own:
            check_filter(name, args[num_own], args[num_own + 1 :], kwargs)
        return function(*args, **kwargs)

    return bounded


def _strftime_now(form: str) -> str:
    check_percent(form, ())  # a C library may know widths
    return datetime.now().strftime(form)


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
    for width in (indent, len(indent) if isinstance(indent, str) else 0):
        if isinstance(width, int) and width > MAX_JSON_INDENT:
            raise SecurityError(f"tojson(indent={width}): the limit is {MAX_JSON_INDENT}")
    # jinja's own escapes HTML, which models were not trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
