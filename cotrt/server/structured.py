"""Structured outputs as requests ask for them: ``response_format``, guided fields, forced tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from cotrt.options.sampling import StructuredOutputs
from cotrt.program.reply_parser import CALL, CALL_END, PYTHON_TAG
from cotrt.sampling.grammar import JSON_OPTIONS
from cotrt.sampling.thoughts import tag_term
from cotrt.server.errors import ApiError
from cotrt.server.sampling_fields import RequestModel, SamplingFields, Text
from cotrt.server.schemas import arguments_schema, closed

_COMPACT = {"x-guidance": JSON_OPTIONS}
_Choice = Annotated[list[Text], Field(min_length=1, max_length=4096)]


class JsonSchemaFormat(RequestModel):
    """OpenAI's ``json_schema``. The schema is always followed; ``strict`` closes its objects."""

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
    thought: Literal["open", "optional"] | None = None


class GuidedFields(SamplingFields):
    """Sampling, and a grammar that the output follows; at most one is given."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredFields | None = None
    guided_json: dict[str, Any] | Text | None = None
    guided_regex: Text | None = None
    guided_choice: _Choice | None = None
    guided_grammar: Text | None = None

    @property
    def grammar_field(self) -> str:
        """Which of the request's fields has its grammar."""
        names = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
        for name in ("structured_outputs", *names):
            if getattr(self, name) is not None:
                return name
        return "response_format"

    @property
    def names(self) -> dict[str, str]:
        """The request's own names for what errors blame by another; "": what it asks about."""
        return {"structured_outputs": self.grammar_field}

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
            schema = form.json_schema.json_schema
            wanted.append({"json": closed(schema) if form.json_schema.strict else schema})
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
                param=self.grammar_field,
            )
        if not wanted:
            return None
        size = len(json.dumps(wanted[0]))
        if size > max_chars:
            raise ApiError(
                400,
                f"{self.grammar_field}: a grammar of {size} characters, the limit is {max_chars}",
                param=self.grammar_field,
            )
        return StructuredOutputs(**wanted[0])


def tool_grammar(
    style: str | None, tools: Sequence[dict[str, Any]], added_tokens: Mapping[str, int]
) -> StructuredOutputs:
    """A grammar whose outputs are calls of these tools, as the model writes them.

    Args:
        style: "hermes" or "llama3_json".
        tools: as the template sees them; one of them is called.
        added_tokens: of the tokenizer: tags that are tokens are written as such.

    Raises:
        ApiError: the server finds no tool calls in its model's text.
    """
    if style is None:
        raise ApiError(
            400, "tool_choice: this server's --tool-call-parser is none", param="tool_choice"
        )
    key = "arguments" if style == "hermes" else "parameters"
    rules = []
    for index, tool in enumerate(tools):
        name = json.dumps(tool["function"]["name"])
        schema = {**arguments_schema(tool["function"].get("parameters")), **_COMPACT}
        rules.append(f'call{index}: ({_heads(name, key)}) arguments{index} "}}"')
        rules.append(f"arguments{index}: %json {json.dumps(schema)}")
    calls = " | ".join(f"call{index}" for index in range(len(tools)))
    if style == "hermes":
        begin, end = tag_term(CALL, added_tokens), tag_term(CALL_END, added_tokens)
        start = f'start: {begin} white ({calls}) white {end}\nwhite: "\\n"?'
    else:
        start = f"start: {tag_term(PYTHON_TAG, added_tokens)}? ({calls})"
    return StructuredOutputs(grammar="\n".join((start, *rules)) + "\n")


def _heads(name: str, key: str) -> str:
    """How a call's object begins, with spaces and without."""
    forms = (f'{{"name": {name}, "{key}": ', f'{{"name":{name},"{key}":')
    return " | ".join(map(json.dumps, forms))
