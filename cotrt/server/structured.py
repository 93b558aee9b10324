"""Structured outputs as requests ask for them: ``response_format``, guided fields, forced tools."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from cotrt.options.sampling import StructuredOutputs
from cotrt.server.errors import ApiError
from cotrt.server.sampling_fields import RequestModel, SamplingFields, Text

_Choice = Annotated[list[Text], Field(min_length=1, max_length=4096)]


class JsonSchemaFormat(RequestModel):
    """OpenAI's ``json_schema``. ``strict`` makes no difference: the schema is always followed."""

    name: Annotated[str, Field(max_length=256)] | None = None
    description: str | None = None
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(RequestModel):
    """OpenAI's ``response_format``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredFields(RequestModel):
    """vLLM's ``structured_outputs``: exactly one of them."""

    json_schema: Annotated[dict[str, Any] | Text | None, Field(alias="json")] = None
    regex: Text | None = None
    choice: _Choice | None = None
    grammar: Text | None = None


class GuidedFields(SamplingFields):
    """Sampling, and a grammar that the output follows; at most one is given."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredFields | None = None
    guided_json: dict[str, Any] | Text | None = None
    guided_regex: Text | None = None
    guided_choice: _Choice | None = None
    guided_grammar: Text | None = None

    def grammar(self, max_chars: int) -> StructuredOutputs | None:
        """What the output must follow, or None.

        Raises:
            ApiError: two grammars, half a one, or one that is longer than `max_chars`.
        """
        wanted: list[dict[str, Any]] = []
        form = self.response_format
        if form is not None and form.type == "json_schema":
            if form.json_schema is None:
                raise ApiError(
                    400,
                    "response_format: type json_schema needs json_schema",
                    param="response_format",
                )
            wanted.append({"json": form.json_schema.json_schema})
        if form is not None and form.type == "json_object":
            wanted.append({"json": {"type": "object"}})
        if self.structured_outputs is not None:
            wanted.append(self.structured_outputs.model_dump(by_alias=True, exclude_none=True))
        guided = {
            "json": self.guided_json,
            "regex": self.guided_regex,
            "choice": self.guided_choice,
            "grammar": self.guided_grammar,
        }
        wanted += [{name: value} for name, value in guided.items() if value is not None]
        if len(wanted) > 1:
            raise ApiError(
                400,
                "give one of response_format, structured_outputs and the guided fields, not "
                f"{len(wanted)}",
                param="response_format",
            )
        if not wanted:
            return None
        size = len(json.dumps(wanted[0]))
        if size > max_chars:
            raise ApiError(
                400,
                f"a grammar of {size} characters, the limit is {max_chars}",
                param="structured_outputs",
            )
        return StructuredOutputs(**wanted[0])


def tool_grammar(style: str | None, tools: Sequence[dict[str, Any]]) -> StructuredOutputs:
    """A grammar whose outputs are calls of these tools, as the model writes them.

    Args:
        style: "hermes" or "llama3_json".
        tools: as the template sees them; one of them is called.

    Raises:
        ApiError: the server finds no tool calls in its model's text.
    """
    if style is None:
        raise ApiError(
            400, "tool_choice: this server's --tool-call-parser is none", param="tool_choice"
        )
    key = "arguments" if style == "hermes" else "parameters"
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool["function"]["name"]},
                key: tool["function"].get("parameters") or {"type": "object"},
            },
            "required": ["name", key],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    if style != "hermes":
        return StructuredOutputs(json={"anyOf": calls})
    schema = json.dumps({"anyOf": calls})
    lark = f'start: "<tool_call>\\n" call "\\n</tool_call>"\ncall: %json {schema}\n'
    return StructuredOutputs(grammar=lark)
