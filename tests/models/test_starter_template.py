"""The starter model's template: as its file's where there are no tools, and with them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cotrt.models.chat_template import render
from cotrt.models.starter_template import TEMPLATE

# What SmolLM2's own template writes, as data: a default system message, then turns.
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
USER, REPLY = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}


def turns(messages: list[dict[str, Any]]) -> str:
    return "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)


@pytest.mark.parametrize("messages", [[USER], [USER, REPLY, USER], [REPLY]])
@pytest.mark.parametrize("system", [None, "Be brief."])
def test_without_tools_it_is_the_models_own(
    messages: list[dict[str, Any]], system: str | None
) -> None:
    given = [{"role": "system", "content": system}] * (system is not None) + messages
    shown = [{"role": "system", "content": system or SYSTEM}, *messages]
    assert render(TEMPLATE, given) == turns(shown) + "<|im_start|>assistant\n"
    assert render(TEMPLATE, given, add_generation_prompt=False) == turns(shown)


def test_tools_calls_and_answers_are_shown() -> None:
    tool = {"type": "function", "function": {"name": "now"}}
    call = {"id": "abcdefghi", "function": {"name": "now", "arguments": {"z": "a"}}}
    messages = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
    ]
    text = render(TEMPLATE, messages, tools=[tool])
    assert json.dumps(tool) in text.partition("<|im_end|>")[0] and SYSTEM in text
    written = '<tool_call>\n{"name": "now", "arguments": {"z": "a"}}\n</tool_call>'
    assert f"<|im_start|>assistant\n{written}\n{written}<|im_end|>" in text
    answers = "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>"
    assert f"<|im_start|>user\n{answers}<|im_end|>\n<|im_start|>assistant\n" in text
