"""Templates render as transformers renders them, in a sandbox that bounds time and size."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from cotrt.errors import InvalidRequestError, ModelLoadError
from cotrt.models.chat_template import render
from cotrt.models.tokenizer import read_chat_template

HI = [{"role": "user", "content": "Hi"}]
CHATML = (
    "{% for m in messages %}{{ '<s>' + m['role'] + ':' + m['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant:' }}{% endif %}"
)


def test_contents_may_be_text_parts_or_null() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": None}]
    assert render(CHATML, messages) == "<s>user:ab</s><s>assistant:</s><s>assistant:"


@pytest.mark.parametrize(
    ("messages", "word"),
    [
        ([], "empty"),
        ("hi", "list of"),
        ({"role": "user"}, "list of"),
        (["hi"], r"messages\[0\] must be a dict"),
        ([{"content": "x"}], "needs a 'role'"),
        ([{"role": 3, "content": "x"}], "needs a 'role'"),
        ([{"role": "user", "content": 3}], "must be a string"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "type 'image_url'"),
        ([{"role": "user", "content": ["x"]}], "only text parts"),
        ([{"role": "user", "content": [{"type": "text"}]}], "without text"),
        ([{"role": "user", "content": "x", "extra": object()}], "plain JSON data"),
    ],
)
def test_messages_of_another_form_are_refused(messages: Any, word: str) -> None:
    with pytest.raises(InvalidRequestError, match=word):
        render(CHATML, messages)


def test_the_callers_messages_are_not_changed() -> None:
    messages = [{"role": "assistant", "content": "a</s>"}]
    before = [dict(m) for m in messages]
    render(CHATML, messages, continue_final_message=True, guarded=["</s>"], guard="\ue100")
    assert messages == before


def test_the_last_message_is_continued_where_it_ends() -> None:
    messages = [*HI, {"role": "assistant", "content": "so "}]
    text = render(CHATML, messages, continue_final_message=True)
    assert text == "<s>user:Hi</s><s>assistant:so "
    with pytest.raises(InvalidRequestError, match="needs a last message of role 'assistant'"):
        render(CHATML, HI, continue_final_message=True)
    with pytest.raises(InvalidRequestError, match="leaves the last message out"):
        render("nothing", messages, continue_final_message=True)


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "chat_template", "tools"])
def test_template_variables_may_not_take_the_place_of_arguments(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=rf"may not set {name}"):
        render(CHATML, HI, variables={name: "x"})


def test_template_variables_reach_the_template_as_plain_data() -> None:
    assert render("{{ enable_thinking }}", HI, variables={"enable_thinking": False}) == "False"
    with pytest.raises(InvalidRequestError, match="plain JSON data"):
        render("{{ x }}", HI, variables={"x": threading.Lock()})


WOVEN = """\
{%- macro show(m, n=1) %}[{{ m.role ~ ':' ~ m.content * n }}]{% endmacro -%}
{%- for m in messages if m.role != 'system' %}
{{ loop.index }}/{{ loop.length }} {{ loop.first }} {{ loop.last }} {{ show(m, n=2) }}
{%- if loop.nextitem %}{{ loop.nextitem.role }}{% endif %}{% else %}none{% endfor %}
{% set ns = namespace(n=0) %}{% for i in range(3) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}
{%- for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}
{%- for m in messages[::-1] %}{% if m.role == 'user' %}{{ m.content }}{% break %}{% endif %}
{%- endfor %}{{ 'a,b'.split(',') | join('-') | upper }}{{ '%03d' | format(7) }}{{ 2 ** 5 }}
{%- generation %}said{% endgeneration %}{{ {'é': '<b>'} | tojson }}{{ 'x'.center(5) }}
"""


@pytest.mark.parametrize(
    "messages", [HI, [*HI, {"role": "assistant", "content": "Yo"}], [{"role": "system"}]]
)
def test_what_is_woven_in_changes_no_output(messages: list[dict[str, str]]) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [{"content": "", **m} for m in messages]
    (theirs,), _ = render_jinja_template([messages], chat_template=WOVEN)
    assert render(WOVEN, messages, add_generation_prompt=False) == theirs


ENDLESS = {
    "nested loops": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    ),
    "filtered loops": (
        "{% for i in range(99999) if range(99999) | list | length == 0 %}{% endfor %}"
    ),
    "macros": (
        "{% macro f(n) %}{% if n < 60 %}{{ f(n + 1) }}{{ f(n + 1) }}{% endif %}{% endmacro %}"
        "{{ f(0) }}"
    ),
    "recursive loops": (
        "{% for i in [[1, 1]] recursive %}{% if loop.depth < 60 %}{{ loop([[1]]) }}"
        "{{ loop([[1]]) }}{% endif %}{% endfor %}"
    ),
    "endless recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "repetition": "{{ ('a' * 10 ** 12) | length }}",
    "list repetition": "{{ ([1] * 10 ** 12) | length }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "squaring": (
        "{% set ns = namespace(x=3) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}"
        "{% endfor %}"
    ),
    "doubling by ~": (
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}"
        "{% endfor %}"
    ),
    "doubling by +": (
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}"
        "{% endfor %}"
    ),
    "doubling by blocks": (
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}"
        "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}"
    ),
    "long range": "{{ range(10 ** 9) | list | length }}",
    "padding": "{{ 'x'.center(10 ** 10) | length }}",
    "padding filter": "{{ ('x' | center(10 ** 10)) | length }}",
    "format width": "{{ '%9999999999d' | format(1) }}",
    "format operator": "{{ '%9999999999d' % 1 }}",
    "format method": "{{ '{:9999999999}'.format(1) }}",
    "replacement": "{{ ('x' * 1000000).replace('x', 'y' * 1000000) | length }}",
}


@pytest.mark.parametrize("template", ENDLESS.values(), ids=list(ENDLESS))
def test_templates_without_end_are_stopped(template: str) -> None:
    began = time.thread_time()
    with pytest.raises(InvalidRequestError, match="chat template"):
        render(template, HI)
    # The bound is on this thread's CPU time: what else the machine does is not in it.
    assert time.thread_time() - began < 1.0


ATTACKS = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('touch MARK') }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context.vars }}",
    "{{ namespace.__init__.__globals__['__builtins__']['open']('MARK', 'w') }}",
    "{{ raise_exception.__globals__.os }}",
    "{{ strftime_now.__globals__.os }}",
    "{{ _tick.__self__.deadline }}",
    "{{ (messages | _counted)._budget.deadline }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{{ '{0.__class__.__mro__}'.format(1) }}",
    "{{ '{x.__class__.__mro__}'.format_map({'x': 1}) }}",
]


@pytest.mark.parametrize("template", ATTACKS)
def test_templates_that_reach_out_raise_and_run_nothing(template: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    with pytest.raises(InvalidRequestError, match="chat template"):
        render(template.replace("MARK", str(mark)), HI)
    assert not mark.exists()


def test_a_template_may_refuse_and_its_reason_is_told() -> None:
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}", HI)


def test_a_template_that_is_not_jinja_says_so() -> None:
    with pytest.raises(InvalidRequestError, match="not valid jinja"):
        render("{% for x in %}", HI)


def test_a_template_that_failed_does_not_spoil_the_next_rendering() -> None:
    template = "{% for i in range(n) %}{% for j in range(n) %}{% endfor %}{% endfor %}done"
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="ran for more"):
            render(template, HI, variables={"n": 99999})
        assert render(template, HI, variables={"n": 3}) == "done"


def test_threads_render_one_template_at_once_each_within_its_own_budget() -> None:
    template = "{% for i in range(n) %}{% for j in range(n) %}{% endfor %}{% endfor %}done"
    results: list[str] = []

    def work(n: int) -> None:
        try:
            results.append(render(template, HI, variables={"n": n}))
        except InvalidRequestError:
            results.append("stopped")

    threads = [threading.Thread(target=work, args=(n,)) for n in (99999, 5, 5, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == ["done", "done", "done", "stopped"]


def test_a_template_is_given_as_source_or_as_a_file(tmp_path: Path) -> None:
    assert read_chat_template("{{ messages }}") == "{{ messages }}"
    (tmp_path / "t.jinja").write_text("from file")
    assert read_chat_template(str(tmp_path / "t.jinja")) == "from file"
    with pytest.raises(ModelLoadError, match="neither jinja source nor a file"):
        read_chat_template("missing.jinja")
    with pytest.raises(InvalidRequestError, match="not valid jinja"):
        read_chat_template("{{")
