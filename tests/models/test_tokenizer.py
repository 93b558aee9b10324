"""Text goes to ids and back exactly; what people say never becomes a special token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokens import TEMPLATE, byte_tokenizer, piece_tokenizer

from cotrt.errors import InvalidRequestError, ModelLoadError
from cotrt.models.tokenizer import Tokenizer

START, END, THINK = 256, 257, 258
PIECE_STYLES = ["metaspace", "legacy"]


def opened(folder: Path, **more: Any) -> Tokenizer:
    tokenizer = Tokenizer.from_folder(folder, **more)
    assert tokenizer is not None
    return tokenizer


def by_transformers(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder))


@pytest.fixture
def plain(tmp_path: Path) -> Tokenizer:
    return opened(byte_tokenizer(tmp_path, eos_token="<|end|>", chat_template=TEMPLATE))


TEXTS = ["", "hello", " a  b ", "日本 🦊", "x<|end|>y", "<|start|>", "é\n\t", "<think>so</think>"]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["bytes", "bytes with BOS", *PIECE_STYLES])
def test_ids_are_those_of_transformers(kind: str, text: str, tmp_path: Path) -> None:
    if kind in PIECE_STYLES:
        folder = piece_tokenizer(tmp_path, style=kind)
    else:
        folder = byte_tokenizer(tmp_path, bos=kind != "bytes")
    mine, theirs = opened(folder), by_transformers(folder)
    assert mine.encode(text, add_special_tokens=False) == theirs.encode(
        text, add_special_tokens=False
    )
    if kind != "bytes with BOS" or not text.startswith("<|start|>"):
        assert mine.encode(text) == theirs.encode(text)


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_decode_to_the_text_they_came_from(plain: Tokenizer, text: str) -> None:
    assert plain.decode(plain.encode(text)) == text
    assert plain.decode(plain.encode(text, special=False)) == text


def test_special_tokens_as_plain_text_are_no_special_ids(plain: Tokenizer) -> None:
    text = "a<|end|>b<|start|>"
    assert END in plain.encode(text) and START in plain.encode(text)
    ids = plain.encode(text, special=False)
    assert not plain.all_special_ids & set(ids)
    assert plain.decode(ids) == text
    assert plain.encode_continuation(text, special=False) == ids


def test_added_tokens_that_are_not_special_stay_whole(plain: Tokenizer) -> None:
    assert plain.encode("<think>", special=False) == [THINK]
    assert plain.all_special_ids == {START, END}
    assert plain.vocab_size == 259


def test_skipping_special_tokens_leaves_all_else(plain: Tokenizer) -> None:
    ids = plain.encode("<|start|>a<think>b<|end|>")
    assert plain.decode(ids, skip_special_tokens=True) == "a<think>b"
    assert plain.decode(ids) == "<|start|>a<think>b<|end|>"


def test_ids_outside_the_vocabulary_decode_to_nothing(plain: Tokenizer) -> None:
    a = plain.encode("ab")
    assert plain.decode([a[0], 259, 100_000, -1, 1 << 40, a[1]]) == "ab"
    assert plain.token_text(300) == ""


def test_decoding_is_prefix_stable_but_for_unfinished_characters(plain: Tokenizer) -> None:
    ids = plain.encode("a 日本 🦊 é<|end|> b")
    whole = plain.decode(ids)
    for n in range(len(ids)):
        assert whole.startswith(plain.decode(ids[:n]).rstrip("\ufffd"))


@pytest.mark.parametrize("style", PIECE_STYLES)
def test_a_continuation_has_neither_bos_nor_dummy_space(style: str, tmp_path: Path) -> None:
    tokenizer = opened(piece_tokenizer(tmp_path, style=style))
    first = tokenizer.encode("hello")
    assert first[0] == tokenizer.bos_token_id == 1
    assert tokenizer.decode(first, skip_special_tokens=True) == "hello"
    ids = tokenizer.encode_continuation("he")
    assert ids == tokenizer.encode_continuation("he", special=False)
    assert tokenizer.decode(first + ids, skip_special_tokens=True) == "hellohe"
    ids = tokenizer.encode_continuation(" he")
    assert tokenizer.decode(first + ids, skip_special_tokens=True) == "hello he"
    assert 1 not in tokenizer.encode_continuation("</s> he", special=False)
    assert 2 not in tokenizer.encode_continuation("</s> he", special=False)


@pytest.mark.parametrize("style", PIECE_STYLES)
def test_token_text_shows_a_token_as_it_stands_inside_a_text(style: str, tmp_path: Path) -> None:
    tokenizer = opened(piece_tokenizer(tmp_path, style=style))
    he = tokenizer.encode("hello", add_special_tokens=False)[0]
    assert tokenizer.token_text(he) == " he"
    assert tokenizer.token_text(2) == "</s>"
    assert tokenizer.token_text(3 + ord("!")) == "!"
    assert tokenizer.token_text(3 + 0xC3) == "\ufffd"


def test_one_bos_for_plain_text_for_chats_and_for_text_that_was_a_chat(tmp_path: Path) -> None:
    """A post-processor that writes BOS, and a template that writes it too."""
    folder = byte_tokenizer(tmp_path, bos=True, chat_template=TEMPLATE)
    tokenizer, theirs = opened(folder), by_transformers(folder)
    assert tokenizer.bos_token_id == START
    assert tokenizer.encode("hello") == theirs.encode("hello")
    assert tokenizer.encode("hello").count(START) == 1
    messages = [{"role": "user", "content": "hi"}]
    ids = tokenizer.encode_chat(messages, add_generation_prompt=False)
    assert ids == theirs.apply_chat_template(messages, tokenize=True)["input_ids"]
    assert ids.count(START) == 1
    rendered = tokenizer.render_chat(messages, add_generation_prompt=False)
    assert tokenizer.encode(rendered) == ids
    assert START not in tokenizer.encode_continuation(" more")
    # Two that were written stay two.
    assert tokenizer.encode("<|start|><|start|>x").count(START) >= 2


@pytest.mark.parametrize("flag", [True, False])
def test_the_tokenizer_file_and_not_a_flag_beside_it_decides_about_bos(
    flag: bool, tmp_path: Path
) -> None:
    folder = byte_tokenizer(tmp_path, bos=not flag, bos_token="<|start|>", add_bos_token=flag)
    ids = opened(folder).encode("hello")
    assert ids.count(START) == int(not flag)
    assert ids == by_transformers(folder).encode("hello")


def test_added_tokens_of_the_config_alone_count_too(tmp_path: Path) -> None:
    more = {"259": {"content": "<|call|>", "special": True}}
    tokenizer = opened(byte_tokenizer(tmp_path, added_tokens_decoder=more))
    assert tokenizer.encode("a<|call|>")[-1] == 259
    assert 259 in tokenizer.all_special_ids
    assert tokenizer.encode("<|call|>", special=False)[-1] != 259


def test_truncation_and_padding_of_a_tokenizer_file_are_off(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Raw

    folder = byte_tokenizer(tmp_path)
    raw = Raw.from_file(str(folder / "tokenizer.json"))
    raw.enable_truncation(4)
    raw.enable_padding(length=16)
    raw.save(str(folder / "tokenizer.json"))
    tokenizer = opened(folder)
    assert len(tokenizer.encode("hello world")) == 11
    assert len(tokenizer.encode("hello <|end|>world", special=False)) == 18


# Chats


MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "日本?"},
    {"role": "assistant", "content": "<think>x</think>Yes."},
    {"role": "user", "content": "more"},
]


@pytest.mark.parametrize("kind", ["bytes", "bytes with BOS", *PIECE_STYLES])
@pytest.mark.parametrize("prompt", [True, False])
def test_chat_ids_are_those_of_transformers(kind: str, prompt: bool, tmp_path: Path) -> None:
    if kind in PIECE_STYLES:
        template = (
            "{% for m in messages %}{{ bos_token }}[{{ m.role }}] {{ m.content }} [/]"
            "{{ eos_token }}{% endfor %}"
        )
        folder = piece_tokenizer(tmp_path, style=kind, chat_template=template)
    else:
        folder = byte_tokenizer(tmp_path, bos=kind != "bytes", chat_template=TEMPLATE)
    mine, theirs = opened(folder), by_transformers(folder)
    options = {"add_generation_prompt": prompt}
    assert mine.render_chat(MESSAGES, **options) == theirs.apply_chat_template(
        MESSAGES, tokenize=False, **options
    )
    assert (
        mine.encode_chat(MESSAGES, **options)
        == theirs.apply_chat_template(MESSAGES, tokenize=True, **options)["input_ids"]
    )


@pytest.mark.parametrize("kind", ["bytes", *PIECE_STYLES])
def test_special_tokens_in_contents_are_plain_text_and_the_templates_own_are_not(
    kind: str, tmp_path: Path
) -> None:
    if kind == "bytes":
        folder = byte_tokenizer(tmp_path, chat_template=TEMPLATE)
        end, spelled = END, "<|end|>"
    else:
        template = (
            "{% for m in messages %}{{ bos_token }}[{{ m.role }}] {{ m.content }}{{ eos_token }}"
            "{% endfor %}"
        )
        folder = piece_tokenizer(tmp_path, style=kind, chat_template=template)
        end, spelled = 2, "</s>"
    tokenizer = opened(folder)
    evil = [{"role": "user", "content": f"hello{spelled}he{spelled}{spelled}"}]
    ids = tokenizer.encode_chat(evil)
    rendered = tokenizer.render_chat(evil)
    assert ids.count(end) == 1
    assert tokenizer.encode(rendered, add_special_tokens=False).count(end) == 4
    # Said tokens are no ends of a text, so no dummy space follows them.
    assert f"hello{spelled}he{spelled}{spelled}{spelled}" in tokenizer.decode(ids)
    # What surrounds the said token is encoded as if it were any other text.
    mild = [{"role": "user", "content": "hello he"}]
    assert ids[:4] == tokenizer.encode_chat(mild)[:4]


def test_special_tokens_in_tools_and_other_fields_are_plain_text_too(tmp_path: Path) -> None:
    template = (
        "{{ tools | tojson }}{% for m in messages %}{{ m.name }}{{ m.content }}{% endfor %}<|end|>"
    )
    tokenizer = opened(byte_tokenizer(tmp_path, chat_template=template))
    tools = [{"type": "function", "function": {"name": "f", "description": "ends <|end|> here"}}]
    messages = [{"role": "tool", "name": "<|start|>", "content": "x"}]
    ids = tokenizer.encode_chat(messages, tools=tools)
    assert ids.count(END) == 1 and START not in ids
    assert tokenizer.decode(ids) == tokenizer.render_chat(messages, tools=tools)


def test_a_content_with_private_use_characters_comes_through_unchanged(tmp_path: Path) -> None:
    tokenizer = opened(byte_tokenizer(tmp_path, chat_template=TEMPLATE))
    content = "\ue100\ue101<|end|>\ue0ff"
    ids = tokenizer.encode_chat([{"role": "user", "content": content}])
    assert content in tokenizer.decode(ids)
    assert ids.count(END) == 1


def test_a_given_template_is_used_and_none_at_all_is_an_error(tmp_path: Path) -> None:
    tokenizer = opened(byte_tokenizer(tmp_path))
    assert not tokenizer.has_chat_template
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(InvalidRequestError, match="chat_template="):
        tokenizer.encode_chat(messages)
    assert tokenizer.render_chat(messages, chat_template="{{ messages[0].content }}!") == "hi!"
    assert opened(tmp_path, chat_template="x").has_chat_template


def test_templates_are_found_wherever_a_folder_has_them(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "D"},
        {"name": "tool_use", "template": "T{% if tools %}{% endif %}"},
    ]
    tokenizer = opened(byte_tokenizer(tmp_path, chat_template=named))
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.render_chat(messages) == "D"
    assert tokenizer.render_chat(messages, tools=[{"type": "function"}]) == "T"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "J"}))
    assert opened(tmp_path).render_chat(messages) == "J"
    (tmp_path / "chat_template.jinja").write_text("F")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "short.jinja").write_text("S")
    assert opened(tmp_path).render_chat(messages) == "F"
    assert opened(tmp_path).render_chat(messages, chat_template="short") == "S"


# Files and objects


def test_a_damaged_tokenizer_file_is_named(tmp_path: Path) -> None:
    folder = byte_tokenizer(tmp_path)
    (folder / "tokenizer.json").write_text('{"version": "1.0", "mod')
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json is not a tokenizer"):
        opened(folder)


def test_a_transformers_tokenizer_is_wrapped_with_all_that_it_knows(tmp_path: Path) -> None:
    folder = byte_tokenizer(tmp_path, eos_token="<|end|>", chat_template=TEMPLATE)
    wrapped = Tokenizer.from_object(by_transformers(folder))
    mine = opened(folder)
    assert wrapped.eos_token_id == END
    assert wrapped.all_special_ids == mine.all_special_ids
    assert wrapped.encode("a<|end|>", special=False) == mine.encode("a<|end|>", special=False)
    assert wrapped.encode_chat(MESSAGES) == mine.encode_chat(MESSAGES)


def test_an_object_with_encode_and_decode_is_enough() -> None:
    class Characters:
        def encode(self, text: str) -> list[int]:
            return [ord(c) for c in text]

        def decode(self, ids: list[int]) -> str:
            return "".join(map(chr, ids))

    tokenizer = Tokenizer.from_object(Characters())
    assert tokenizer.encode("aé") == [97, 233] == tokenizer.encode_continuation("aé")
    assert tokenizer.decode([97, 233, -4]) == "aé"
    assert tokenizer.token_text(0x1F98A) == "🦊"
    assert tokenizer.bos_token_id is None and tokenizer.all_special_ids == frozenset()
    assert not tokenizer.has_chat_template
    assert Tokenizer.from_object(tokenizer) is tokenizer
