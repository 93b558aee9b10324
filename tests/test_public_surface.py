"""What `import cotrt` offers: exactly `__all__`, and a docstring with its errors for each name."""

from __future__ import annotations

import ast
import importlib
import inspect
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cotrt

NAMES = [name for name in cotrt.__all__ if name != "__version__"]


def test_all_is_sorted_and_complete() -> None:
    # The order is ruff's: constants, then classes, then the rest.
    def kind(name: str) -> tuple[int, str]:
        return (0 if name.isupper() else 1 if name[:1].isupper() else 2, name)

    assert cotrt.__all__ == sorted(cotrt.__all__, key=kind)
    assert len(set(cotrt.__all__)) == len(cotrt.__all__)
    assert set(cotrt._HOME_OF) | {"__version__"} == set(cotrt.__all__)
    assert set(cotrt.__all__) <= set(dir(cotrt))


def test_type_checkers_and_the_lazy_table_agree() -> None:
    tree = ast.parse(Path(cotrt.__file__).read_text(encoding="utf-8"))
    blocks = [node for node in tree.body if isinstance(node, ast.If)]
    assert [ast.unparse(block.test) for block in blocks] == ["TYPE_CHECKING"]
    seen = {
        alias.name: node.module
        for node in blocks[0].body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == cotrt._HOME_OF


@pytest.mark.parametrize("name", NAMES)
def test_name_is_there_and_lives_where_the_table_says(name: str) -> None:
    value = getattr(cotrt, name)
    assert value is getattr(importlib.import_module(cotrt._HOME_OF[name]), name)
    assert value.__module__ == cotrt._HOME_OF[name]


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Brunch'"):
        cotrt.Brunch  # noqa: B018


def test_every_error_is_a_cotrt_error() -> None:
    errors = [value for value in map(cotrt.__getattr__, NAMES) if _is_error(value)]
    assert len(errors) == 10
    assert all(issubclass(error, cotrt.CotrtError) for error in errors)
    assert issubclass(cotrt.InvalidRequestError, ValueError)


def test_version_is_a_plain_release() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", cotrt.__version__)


def test_the_package_is_typed_and_silent() -> None:
    assert (Path(cotrt.__file__).parent / "py.typed").is_file()
    # No handler of its own: Python shows warnings on stderr where the program sets none.
    assert not logging.getLogger("cotrt").handlers


def _is_error(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Exception)


def _public_members(cls: type) -> Iterator[tuple[str, Any]]:
    """The functions and properties that a class itself defines under a public name."""
    for name, member in vars(cls).items():
        if not name.startswith("_") and (
            isinstance(member, (property, staticmethod, classmethod)) or inspect.isfunction(member)
        ):
            yield name, member


def _function_of(member: Any) -> Any:
    if isinstance(member, property):
        return member.fget
    return getattr(member, "__func__", member)


def _raised_here(function: Any) -> set[str]:
    """Errors of cotrt that the body itself raises."""
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        return set()
    names = set(re.findall(r"\braise (\w+)\(", source))
    return {name for name in names if name in cotrt._HOME_OF}


@pytest.mark.parametrize("name", NAMES)
def test_public_name_has_a_docstring(name: str) -> None:
    value = getattr(cotrt, name)
    assert (value.__doc__ or "").strip(), f"cotrt.{name} has no docstring"
    # A dataclass without one is given its signature.
    assert not value.__doc__.startswith(f"{name}("), f"cotrt.{name} has no docstring of its own"


@pytest.mark.parametrize("name", NAMES)
def test_public_members_have_docstrings_that_name_their_errors(name: str) -> None:
    value = getattr(cotrt, name)
    if _is_error(value):
        return
    is_class = isinstance(value, type)
    members = _public_members(value) if is_class else [("()", value)]
    class_doc = value.__doc__ or ""
    for member_name, member in members:
        where = f"cotrt.{name}.{member_name}"
        doc = inspect.getdoc(_function_of(member)) or ""
        assert doc.strip(), f"{where} has no docstring"
        for error in _raised_here(_function_of(member)):
            assert error in doc or error in class_doc, f"{where} raises {error} and does not say so"
