"""The OpenAPI document: every route, every body, references that lead somewhere."""

from __future__ import annotations

import json
from typing import Any

from server_rig import running, scripted

from cotrt.server.openapi import document
from cotrt.server.routes import ROUTES


def references(value: Any) -> set[str]:
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*(references(item) for item in value.values()))
    if isinstance(value, list):
        return set().union(*(references(item) for item in value))
    return set()


def test_it_names_every_route_and_body() -> None:
    found = document(ROUTES, has_keys=True)
    for api in ROUTES:
        operation = found["paths"][api.path.replace(":path", "")][api.method.lower()]
        assert operation["summary"] and str(api.status) in operation["responses"]
        assert ("requestBody" in operation) == (api.body is not None)
        assert ("security" in operation) != api.is_open
    known = {f"#/components/schemas/{name}" for name in found["components"]["schemas"]}
    assert references(found) <= known
    ids = [op["operationId"] for path in found["paths"].values() for op in path.values()]
    assert len(ids) == len(set(ids))
    json.dumps(found)


def test_no_schema_lets_an_unknown_field_pass() -> None:
    schemas = document(ROUTES, has_keys=False)["components"]["schemas"]
    for api in ROUTES:
        if api.body is not None:
            assert schemas[api.body.__name__]["additionalProperties"] is False


def test_it_is_served_and_a_405_names_all_methods() -> None:
    with running(scripted()) as rig:
        assert rig.get("/openapi.json")["openapi"] == "3.1.0"
        status, _, headers = rig.call("PATCH", "/v1/branches")
        assert status == 405
        assert {"GET", "POST"} <= set(headers["allow"].replace(" ", "").split(","))
