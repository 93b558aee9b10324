"""Contents are data whatever they hold; a template's own formats and widths are bounded."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotrt.errors import InvalidRequestError
from cotrt.models.chat_template import render

CONTENTS = [
    '{"order": 123456789, "paid": true}',
    "Sold 12% of 10000000 units",
    "https://example.org/{id}?t=1700000000000",
    "{:>99999999}",
    "%99999999d %*d %(a)99999999s",
    "{0:{1}} }{ %",
    "100%",
]
# What templates do with a content, each with what becomes of it.
USES = {
    "plain": ("{{ c }}", lambda c: c),
    "split": ("{{ c.split('</think>')[-1] }}", lambda c: c),
    "strip": ("{{ c.strip() }}", str.strip),
    "lstrip": ("{{ c.lstrip('\\n') }}", lambda c: c.lstrip("\n")),
    "startswith": ("{% if c.startswith('<') %}<{% else %}{{ c }}{% endif %}", None),
    "replace": ("{{ c.replace('a', 'bb') }}", lambda c: c.replace("a", "bb")),
    "upper": ("{{ c.upper() }}", str.upper),
    "find": ("{{ c.find('x', 99999999) }}{{ c }}", lambda c: f"-1{c}"),
    "indent": ("{{ c | indent(2) }}", lambda c: c.replace("\n", "\n  ")),
    "center": ("{{ c | center(3) }}", None),
    "trim": ("{{ c | trim }}", str.strip),
    "operator": ("{{ 'c: %s' % c }}", lambda c: f"c: {c}"),
    "format": ("{{ 'c: {}'.format(c) }}", lambda c: f"c: {c}"),
    "format filter": ("{{ 'c: %s' | format(c) }}", lambda c: f"c: {c}"),
    "tojson": ("{{ c | tojson }}", lambda c: json.dumps(c, ensure_ascii=False)),
    "replace filter": ("{{ c | replace('a', 'bb') }}", lambda c: c.replace("a", "bb")),
    "join filter": ("{{ [c, c] | join(', ') }}", lambda c: f"{c}, {c}"),
    "join": ("{{ ', '.join([c, c]) }}", lambda c: f"{c}, {c}"),
}


def used(template: str, content: str) -> str:
    template = "{% set c = messages[0].content %}" + template
    return render(template, [{"role": "user", "content": content}])


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("use", USES)
def test_a_content_comes_through_whatever_it_holds(use: str, content: str) -> None:
    template, made = USES[use]
    shown = used(template, content)
    assert content in shown if made is None else shown == made(content)


@settings(max_examples=200, deadline=None)
@given(st.text("{}%:.*()0123456789 sd\nab", max_size=60), st.sampled_from(sorted(USES)))
def test_no_content_is_refused(content: str, use: str) -> None:
    used(USES[use][0], content)


@pytest.mark.parametrize("number", [1_000_001, 20_260_101, 1_767_225_600])
def test_large_numbers_are_no_widths(number: int) -> None:
    for template in ("{{ '%d' % n }}", "{{ '{}'.format(n) }}", "{{ '%s' | format(n) }}"):
        text = render(template, [{"role": "user", "content": ""}], variables={"n": number})
        assert text == str(number)


WIDE = {
    "width": "{{ '%9999999d' % 1 }}",
    "precision": "{{ '%.9999999f' % 1.0 }}",
    "width of a key": "{{ '%(a(b))9999999d' % {'a(b)': 1} }}",
    "width by argument": "{{ '%*d' % (9999999, 1) }}",
    "width in a filter": "{{ '%-9999999s' | format('x') }}",
    "width of a field": "{{ '{:>9999999}'.format('x') }}",
    "width of a nested field": "{{ '{:{w}}'.format('x', w=9999999) }}",
    "width of a mapping": "{{ '{a:9999999}'.format_map({'a': 1}) }}",
    "width in other digits": "{{ '{:\u0669999999}'.format(1) }}",
    "one text many times": "{{ ('{0}' * 100000).format('x' * 1000) }}",
    "one key many times": "{{ ('%(a)s' * 100000) % {'a': 'x' * 1000} }}",
    "ljust": "{{ 'x'.ljust(9999999) }}",
    "zfill": "{{ 'x'.zfill(9999999) }}",
    "tabs": "{{ ('\\t' * 1000).expandtabs(tabsize=900000) }}",
    "indented lines": "{{ ('\\n' * 1000) | indent(900000) }}",
    "translation": "{{ ('x' * 100000).translate({120: 'y' * 1000}) }}",
    "replace filter": "{{ ('x' * 100000) | replace('x', 'y' * 1000) }}",
    "join filter": "{{ (['a'] * 1000) | join('x' * 100000) }}",
    "joined": "{{ ('x' * 100000).join(['a'] * 1000) }}",
    "indented JSON": "{{ [[[1]]] | tojson(indent=900000) }}",
    "a date's width": "{{ strftime_now('%9999999Y') }}",
}


@pytest.mark.parametrize("template", WIDE.values(), ids=list(WIDE))
def test_a_templates_own_widths_are_bounded(template: str) -> None:
    began = time.thread_time()
    with pytest.raises(InvalidRequestError, match="chat template"):
        render(template, [{"role": "user", "content": ""}])
    assert time.thread_time() - began < 0.5


@pytest.mark.parametrize("piece", ["%(", "%", "{", "%%(a", "9", "{:", "%9", "\ue100"])
def test_time_is_linear_whatever_the_content(piece: str) -> None:
    content = piece * 300_000
    for use in ("strip", "split", "indent", "operator", "format"):
        began = time.thread_time()
        used(USES[use][0], content)
        assert time.thread_time() - began < 0.5, use


@pytest.mark.parametrize("form", ["%(" * 300_000, "%" * 300_001, "%(a" * 200_000])
def test_a_content_that_is_a_bad_format_fails_in_linear_time(form: str) -> None:
    began = time.thread_time()
    with pytest.raises(InvalidRequestError, match="chat template"):
        used("{{ c % 1 }}", form)
    assert time.thread_time() - began < 0.5


NOTHING = {
    "tool_calls": [],
    "function_call": None,
    "name": None,
    "audio": {},
    "annotations": [],
    "refusal": None,
}


@pytest.mark.parametrize("key", NOTHING)
def test_an_empty_list_and_null_say_the_same_as_nothing(key: str) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}={{ m.content }}"
        "{% if '" + key + "' in m or m." + key + " is defined %}!{% endif %};{% endfor %}"
    )
    for value in (NOTHING[key], None, [], ()):
        messages = [{"role": "assistant", "content": "a", key: value}]
        assert render(template, messages) == "assistant=a;"
    for content in (None, [], ""):
        assert render(template, [{"role": "user", "content": content}]) == "user=;"


def test_arguments_that_are_empty_stay() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    template = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    assert render(template, [{"role": "assistant", "tool_calls": [call]}]) == "{}"


def test_no_tools_and_an_empty_list_of_tools_are_the_same() -> None:
    template = "{% if tools is not none %}T{{ tools | length }}{% endif %}{{ messages[0].content }}"
    for tools in (None, [], ()):
        assert render(template, [{"role": "user", "content": "a"}], tools=tools) == "a"
