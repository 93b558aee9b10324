"""Arguments as JSON can hold them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cotrt.errors import InvalidRequestError


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
    """How to sample, checked as `Branch.generate` checks it, as a request says it.

    Args:
        params: a `SamplingParams`, taken as it is; None for the server's defaults.
        overrides: fields to set on top.

    Raises:
        pydantic.ValidationError: a bad value or an unknown field.
        InvalidRequestError: ``n`` is not 1, or `params` is something else.
    """
    from cotrt.options.sampling import SamplingParams

    if params is None:
        checked = SamplingParams(**overrides)
        names = checked.model_fields_set
    elif isinstance(params, SamplingParams):
        checked = params.replace(**overrides) if overrides else params
        names = set(SamplingParams.model_fields)
    else:
        raise InvalidRequestError(
            f"params must be a SamplingParams or None, not {type(params).__name__}"
        )
    if checked.n != 1:
        raise InvalidRequestError(f"n={checked.n} on a branch: fork({checked.n}) it instead")
    if checked.prompt_logprobs is not None:
        raise InvalidRequestError("prompt_logprobs on a branch: score(...) what you want them of")
    given = checked.model_dump(by_alias=True, include=set(names))
    if checked.structured_outputs is not None:
        grammar = checked.structured_outputs.model_dump(by_alias=True, exclude_none=True)
        given["structured_outputs"] = grammar
    return {name: plain(value) for name, value in given.items() if value is not None}
