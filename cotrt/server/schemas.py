"""JSON schemas of tools and strict formats, closed where they do not say that they are open."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_OPEN_SAYS = ("additionalProperties", "patternProperties", "unevaluatedProperties")
# Where schemas stand in a schema: by name, in a list, alone.
_BY_NAME = ("properties", "$defs", "definitions", "patternProperties")
_IN_LISTS = ("anyOf", "oneOf", "prefixItems")
_ALONE = ("items", "additionalProperties")
# Beside these an object's properties stand in several places: closing one would forbid the others'.
_JOINED = ("allOf", "$ref", "if", "then", "else", "dependentSchemas")


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema, its objects without properties that it does not name.

    An object that says itself whether it is open, that names no properties at all, or whose
    properties are put together from several schemas is left as it is.
    """
    out = dict(schema)
    for key in _BY_NAME:
        if isinstance(out.get(key), Mapping):
            out[key] = {name: _closed(each) for name, each in out[key].items()}
    for key in _IN_LISTS:
        if isinstance(out.get(key), list) and "properties" not in out:
            out[key] = [_closed(each) for each in out[key]]
    for key in _ALONE:
        if key in out:
            out[key] = _closed(out[key])
    joined = any(key in out for key in (*_JOINED, "anyOf", "oneOf"))
    if "properties" in out and not joined and not any(key in out for key in _OPEN_SAYS):
        out["additionalProperties"] = False
    return out


def _closed(value: Any) -> Any:
    return closed(value) if isinstance(value, Mapping) else value


def arguments_schema(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a tool's arguments must be: an object, empty where the tool has no parameters."""
    schema = closed(parameters or {})
    if not any(key in schema for key in ("properties", "anyOf", "oneOf", *_JOINED, *_OPEN_SAYS)):
        schema["additionalProperties"] = False
    return {"type": "object", **schema}
