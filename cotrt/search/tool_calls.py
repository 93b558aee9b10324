"""Tool calls in a model's text, and the text around a tool's answer."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field
from typing import Any

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"


@dataclass(frozen=True)
class ToolCall:
    """One call.

    Attributes:
        name: of the tool; "" where it could not be read.
        arguments: by name.
        error: why the call could not be read, or None.
    """

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True)
class ToolFormat:
    """The special text around tools' answers, as a chat template writes it.

    Attributes:
        end_of_turn: closes the model's turn, where it did not close it itself.
        before: from there to the first answer.
        between: from one answer to the next.
        after: from the last answer to the model's next turn.
    """

    end_of_turn: str
    before: str
    between: str
    after: str


HERMES = ToolFormat(
    end_of_turn="<|im_end|>",
    before="\n<|im_start|>user\n<tool_response>\n",
    between="\n</tool_response>\n<tool_response>\n",
    after="\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
)
LLAMA3 = ToolFormat(
    end_of_turn="<|eot_id|>",
    before="<|start_header_id|>ipython<|end_header_id|>\n\n",
    between="\n",
    after="<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
)
PLAIN = ToolFormat(end_of_turn="", before="\nObservation: ", between="\nObservation: ", after="\n")

FORMATS = {"hermes": HERMES, "llama3": LLAMA3, "plain": PLAIN}


def format_of(prompt: str) -> ToolFormat:
    """The format that a prompt's chat markers belong to; plain where it has none."""
    if "<|start_header_id|>" in prompt:
        return LLAMA3
    return HERMES if "<|im_start|>" in prompt else PLAIN


def parse_tool_calls(text: str) -> list[ToolCall]:
    """The calls in a turn's text, in order; none where the text is an answer.

    Read are Hermes' and Qwen's ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, any
    number of them, and Llama 3's ``{"name": ..., "parameters": {...}}`` where it is the whole
    text, several with ``;`` between them. A call that is marked but cannot be read has an `error`.
    """
    if _OPEN in text:
        return [_marked_call(part) for part in text.split(_OPEN)[1:]]
    body = text.strip().removeprefix(_PYTHON_TAG).strip()
    calls: list[ToolCall] = []
    decoder = json.JSONDecoder()
    while body.startswith("{"):
        try:
            value, end = decoder.raw_decode(body)
        except (ValueError, RecursionError):
            return []
        if not (isinstance(value, dict) and "name" in value):
            return []
        if "parameters" not in value and "arguments" not in value:
            return []
        calls.append(_as_call(value))
        body = body[end:].lstrip().removeprefix(";").lstrip()
    return [] if body else calls


def _marked_call(part: str) -> ToolCall:
    body = part.split(_CLOSE)[0] if _CLOSE in part else part
    # A string argument may hold the closing mark: the JSON decides where the call ends.
    for candidate in (part.lstrip(), body.lstrip()):
        try:
            return _as_call(json.JSONDecoder().raw_decode(candidate)[0])
        except (ValueError, RecursionError) as error:
            reason = str(error)
    return ToolCall("", error=f"the tool call is not valid JSON: {reason}")


def _as_call(value: Any) -> ToolCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return ToolCall("", error='the tool call needs a "name" that is a string')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # some models write the arguments as JSON in a string
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return ToolCall(value["name"], error='"arguments" must be an object')
    return ToolCall(value["name"], arguments)
