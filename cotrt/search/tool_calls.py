"""The text around a tool's answer, as chat templates write it."""

from __future__ import annotations

from dataclasses import dataclass

from cotrt.program.tool_calls import ToolCall, parse_tool_calls

__all__ = ("FORMATS", "ToolCall", "ToolFormat", "format_of", "parse_tool_calls")


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
