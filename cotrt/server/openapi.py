"""The OpenAPI document, made of the routes and of the models that they are sent."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from cotrt import __version__

if TYPE_CHECKING:
    from cotrt.server.routes import Api

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def document(routes: Iterable[Api], *, has_keys: bool) -> dict[str, Any]:
    """The document as JSON data."""
    schemas: dict[str, Any] = {"Error": _ERROR}
    paths: dict[str, Any] = {}
    for api in routes:
        path = re.sub(r"\{(\w+):\w+\}", r"{\1}", api.path)
        paths.setdefault(path, {})[api.method.lower()] = _operation(api, path, schemas, has_keys)
    components: dict[str, Any] = {"schemas": schemas}
    if has_keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "cotrt", "version": __version__},
        "paths": paths,
        "components": components,
    }


def _operation(api: Api, path: str, schemas: dict[str, Any], has_keys: bool) -> dict[str, Any]:
    doc = inspect.getdoc(api.endpoint) or ""
    replies: dict[str, Any] = {
        str(api.status): {"description": "What was asked for.", "content": {api.media: {}}}
    }
    failures = {"503": "The engine has stopped, or the server shuts down."}
    if api.body is not None or "{" in path:
        failures["400"] = "A field is wrong, or what is asked for can never fit."
        failures["404"] = "Unknown model or branch."
    if api.body is not None:
        failures["409"] = "The branch is generating, or was pruned."
        failures["408"] = "The body did not come in time."
        failures["413"] = "The body is too long."
        failures["415"] = "The body is not application/json."
        failures["429"] = "Too much is under way."
        failures["500"] = "The model gave no finite logits for this request."
    if has_keys and not api.is_open:
        failures["401"] = "No valid API key."
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    for status, text in failures.items():
        replies[status] = {"description": text, "content": error}
    operation: dict[str, Any] = {
        "operationId": getattr(api.endpoint, "__name__", path),
        "summary": doc.partition("\n")[0],
        "responses": replies,
    }
    names = re.findall(r"\{(\w+)\}", path)
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in names
    ]
    flags = {"delete_branch": "prune", "get_branch": "full"}
    if flag := flags.get(getattr(api.endpoint, "__name__", "")):
        parameters.append({"name": flag, "in": "query", "schema": {"enum": ["true", "false"]}})
    if parameters:
        operation["parameters"] = parameters
    if api.body is not None:
        schema = api.body.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas.update(schema.pop("$defs", {}))
        required = schema.get("required", ())
        for name, field in schema["properties"].items():
            if name not in required:  # a null is the same as a field that is left out
                schema["properties"][name] = {"anyOf": [field, {"type": "null"}]}
        schemas[api.body.__name__] = schema
        reference = {"$ref": f"#/components/schemas/{api.body.__name__}"}
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": reference}},
        }
        if has_event_stream(api):
            replies[str(api.status)]["content"]["text/event-stream"] = {}
    if has_keys and not api.is_open:
        operation["security"] = [{"key": []}]
    return operation


def has_event_stream(api: Api) -> bool:
    """Its body may ask for a stream."""
    return api.body is not None and "stream" in api.body.model_fields
