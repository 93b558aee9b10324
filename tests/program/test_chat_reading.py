"""What a chat's ids say: however replies were sampled and cut, turns say what is rendered."""

from __future__ import annotations

import os

import pytest
from conversations import KINDS, make_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cotrt.models.added_token import AddedToken
from cotrt.models.tokenizer import Tokenizer
from cotrt.program.chat_reading import continue_chat, read_chat
from cotrt.sampling.output_text import OutputText

NUM_CASES = int(os.environ.get("COTRT_RANDOM_CASES", "200"))
_opened: dict[str, Tokenizer] = {}

MESSAGES = st.text("he lw\n[/]é🦊<>", max_size=12) | st.sampled_from(["<u>", "</s>he", "<e>\n", ""])
REPLIES = st.text("he lw\n[/]é🦊", max_size=12)


def opened(name: str, folders: pytest.TempPathFactory) -> Tokenizer:
    if name not in _opened:
        folder = make_tokenizer(KINDS[name], folders.mktemp("tokenizer") / "t")
        found = Tokenizer.from_folder(folder)
        assert found is not None
        _opened[name] = found
    return _opened[name]


@pytest.mark.parametrize("name", KINDS)
@settings(
    max_examples=NUM_CASES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_turns_say_what_is_rendered(
    name: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    from cotrt import SamplingParams

    kind, reader = KINDS[name], opened(name, tmp_path_factory)
    assert reader.eos_token_id is not None
    ids: list[int] = []
    sampled: list[int] = []
    messages: list[dict[str, str]] = []
    for _ in range(data.draw(st.integers(1, 4))):
        messages.append({"role": "user", "content": data.draw(MESSAGES)})
        chat = reader.prepare_chat(messages, chat_template=kind.template)
        keep, more = continue_chat(reader, chat, ids, sampled)
        ids, sampled = ids[:keep] + more, sampled[:keep] + [0] * len(more)
        assert read_chat(reader, ids, chat.text, sampled) == chat.text
        reply = reader.encode_continuation(data.draw(REPLIES), special=False)
        reply = reply[: data.draw(st.integers(0, len(reply)))]
        ends = data.draw(st.booleans())
        reply += [reader.eos_token_id] * ends
        text = OutputText(reader, SamplingParams(), ids)
        text.append_all(reply, ended_by_token=ends)
        text.finish()
        messages.append({"role": "assistant", "content": text.text})
        ids, sampled = ids + reply, sampled + [1] * len(reply)


def test_a_sampled_space_after_a_tag_is_read_as_it_is_rendered(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    reader = opened("special tags", tmp_path_factory)
    tag = reader.encode_continuation("<a>")
    ids = [*tag, *reader.encode_continuation(" he")]
    for rendered, said in (("<a> he<e>", "<a> he"), ("<a>he<e>", "<a>he"), ("<a>", "<a>he")):
        assert read_chat(reader, ids, rendered, [0, 1]) == said
    # What was given has the dummy space of an encoder, which is no text.
    assert read_chat(reader, ids, "<a> he<e>", [0, 0]) == "<a>he"


def test_white_space_that_a_tag_swallows_is_read_as_it_is_rendered(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    reader = opened("tags that swallow", tmp_path_factory)
    assert AddedToken("<u>", rstrip=True) in reader.added_tokens.values()
    for text in ("<u>\nhe<e>\n<a>\n", "<u>  he<e> \n <a>", "<u>he<e><a>"):
        ids = reader.encode(text, add_special_tokens=False)
        assert len(ids) == 4
        assert read_chat(reader, ids, text + "w", [0] * 4).rstrip() == text.rstrip()
    assert read_chat(reader, ids, "<u>\nwe", [0] * 4) == "<u>\nhe<e><a>"
