"""Arguments as JSON can hold them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def plain(value: Any) -> Any:
    """As JSON can hold it."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def plain_ids(ids: Any) -> list[int]:
    return [int(i) for i in (ids.tolist() if hasattr(ids, "tolist") else ids)]


def plain_sampling(params: Any, overrides: Mapping[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if params is not None:
        given = params.model_dump(by_alias=True)
        fields = {name: given[name] for name in params.model_fields_set}
    fields.update(overrides)
    grammar = fields.get("structured_outputs")
    if grammar is not None and hasattr(grammar, "model_dump"):
        fields["structured_outputs"] = grammar.model_dump(by_alias=True, exclude_none=True)
    return {name: plain(value) for name, value in fields.items() if name != "prompt_logprobs"}
