"""Tools in conversations whose chat template has no place for them: a block of our own.

It says to the model, in the system message or before the first user's text:

    You can call these tools. Each line is the JSON description of one.
    <tools>
    {"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}
    </tools>
    To call one, write this and nothing after it, once for each call:
    <tool_call>
    {"name": the tool's name, "arguments": an object of its arguments}
    </tool_call>
    Its answer comes between <tool_response> and </tool_response>.

Calls and answers of earlier turns are written the same way where the template leaves them out.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jinja2.nodes as nodes

HEAD = "You can call these tools. Each line is the JSON description of one.\n<tools>\n"
TAIL = (
    "\n</tools>\nTo call one, write this and nothing after it, once for each call:\n<tool_call>\n"
    '{"name": the tool\'s name, "arguments": an object of its arguments}\n</tool_call>\n'
    "Its answer comes between <tool_response> and </tool_response>."
)

Messages = list[dict[str, Any]]


class TemplateWords:
    """Names and strings that a template's source uses.

    Args:
        tree: the parsed template.
    """

    def __init__(self, tree: nodes.Template) -> None:
        names = {node.name for node in tree.find_all(nodes.Name)}
        attributes = {node.attr for node in tree.find_all(nodes.Getattr)}
        strings = {n.value for n in tree.find_all(nodes.Const) if isinstance(n.value, str)}
        self.shows_tools = "tools" in names
        self.shows_calls = "tool_calls" in attributes | strings
        # A template that does not tell roles apart writes any.
        self.shows_answers = "user" not in strings or "tool" in strings


def with_calls_as_text(words: TemplateWords, chat: Messages) -> Messages:
    """Messages whose calls and answers of tools the template shows."""
    out: Messages = []
    for message in chat:
        if message.get("tool_calls") and not words.shows_calls:
            rest = {key: value for key, value in message.items() if key != "tool_calls"}
            parts = [message["content"]] * bool(message["content"])
            parts += map(_call_text, message["tool_calls"])
            out.append({**rest, "content": "\n".join(parts)})
        elif message["role"] == "tool" and not words.shows_answers:
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if out and out[-1].get("is_answer"):
                out[-1]["content"] += "\n" + text
            else:
                out.append({"role": "user", "content": text, "is_answer": True})
        else:
            out.append(message)
    return [{k: v for k, v in message.items() if k != "is_answer"} for message in out]


def with_tools(chat: Messages, tools: Sequence[Any]) -> Iterator[tuple[str, Messages]]:
    """The block, and messages that hold it: first as the system's, then as the first user's."""
    block = HEAD + "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools) + TAIL
    if chat[0]["role"] == "system":
        first = {**chat[0], "content": f"{chat[0]['content']}\n\n{block}".lstrip()}
        yield block, [first, *chat[1:]]
    else:
        yield block, [{"role": "system", "content": block}, *chat]
    for index, message in enumerate(chat):
        if message["role"] == "user":
            said = {**message, "content": f"{block}\n\n{message['content']}"}
            yield block, [*chat[:index], said, *chat[index + 1 :]]
            return


def _call_text(call: Any) -> str:
    function = call.get("function", call) if isinstance(call, Mapping) else {}
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):  # else it is shown as it is
            arguments = json.loads(arguments)
    shown = {"name": function.get("name"), "arguments": arguments}
    return f"<tool_call>\n{json.dumps(shown, ensure_ascii=False)}\n</tool_call>"
