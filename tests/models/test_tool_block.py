"""Templates without a place for tools show them in our own block, or the tools are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cotrt import InvalidRequestError
from cotrt.models.chat_template import render

ASK = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
CALL = {"id": "123456789", "type": "function", "function": {"name": "now", "arguments": {"z": 1}}}
CHATML = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
)
USER_ONLY = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %}{{ m.content }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("template", [CHATML, NO_SYSTEM, USER_ONLY])
@pytest.mark.parametrize("system", [None, "Be brief."])
def test_tools_stand_in_every_templates_text(template: str, system: str | None) -> None:
    messages = [{"role": "system", "content": system}] * (system is not None) + ASK
    if system is not None and template != CHATML:
        return  # such a template has no place for a system's message either
    text = render(template, messages, tools=[TOOL])
    assert json.dumps(TOOL) in text and "<tool_call>" in text
    assert "Hi" in text and (system or "") in text
    assert render(template, messages) not in ("", text)


def test_a_template_with_a_place_for_tools_is_left_alone() -> None:
    for template in (
        CHATML + "{% if tools is defined %}{{ tools | length }}{% endif %}",
        "{% if not tools is defined %}{% set tools = none %}{% endif %}{{ tools | length }}",
    ):
        text = render(template, ASK, tools=[TOOL])
        assert text.endswith("1") and "<tools>" not in text


@pytest.mark.parametrize("template", ["fixed", "{% for m in messages %}{{ m.role }}{% endfor %}"])
def test_tools_that_no_text_would_show_are_refused(template: str) -> None:
    with pytest.raises(InvalidRequestError, match="no place for tools") as caught:
        render(template, ASK, tools=[TOOL])
    assert caught.value.field == "tools"


@pytest.mark.parametrize("arguments", [{"z": 1}, '{"z": 1}'])
@pytest.mark.parametrize("template", [CHATML, NO_SYSTEM, USER_ONLY])
def test_calls_and_answers_of_earlier_turns_do_not_vanish(template: str, arguments: Any) -> None:
    call = {**CALL, "function": {"name": "now", "arguments": arguments}}
    messages = [
        *ASK,
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "123456789", "content": "12:00"},
        {"role": "tool", "tool_call_id": "123456789", "content": "13:00"},
    ]
    text = render(template, messages, tools=[TOOL])
    assert 'I look.\n<tool_call>\n{"name": "now", "arguments": {"z": 1}}\n</tool_call>' in text
    assert text.index("12:00") < text.index("13:00")


def test_what_tools_say_is_guarded_and_the_block_is_not() -> None:
    tool = {"type": "function", "function": {"name": "now", "description": "<|end|> <tools>"}}
    text = render(CHATML, ASK, tools=[tool], guarded=("<|end|>", "<tools>"), guard="\ue100")
    assert "<\ue100|end|> <\ue100tools>" in text and "\n<tools>\n" in text


def test_the_last_message_is_continued_beside_a_block() -> None:
    messages = [*ASK, {"role": "assistant", "content": "So"}]
    text = render(CHATML, messages, tools=[TOOL], continue_final_message=True)
    assert text.endswith("<|assistant|>So") and "<tools>" in text
