"""How the names of GGUF pre-tokenizers split texts, against tokenizers built in another way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from cotrt.errors import ModelLoadError
from cotrt.models import gguf_splits

TEXTS = [
    "Steps:\n\n1. Take 1234567 eggs.\n\n2. Boil.\n",
    "a  12 b   345\n\n\n 6\t\t7   ",
    "It's they'LL we're I'D ''s 'tis",
    "def f(x):\n\treturn {'a': 1.5e-3}  # ok\r\n\r\n",
    "Größe naïve coöperate ΑΒΓ Привет ǅungla",
    "中文字符，和標點。日本語のテスト カタカナ 한국어",
    "emoji 👩‍👩‍👧 🎉🎉 ½ ² Ⅷ ٣٤ १२३",
    "HTTPServer camelCaseWord XMLHttpRequest iPhone's",
    "",
    " ",
    "\n",
    "$x^2 + 3~|y| <= `z`$...!!!",
]


def opened(name: str) -> Any:
    tokenizer = Tokenizer(models.BPE())
    gguf_splits.set_split(tokenizer, name, "a.gguf")
    return tokenizer


def pieces(name: str, text: str) -> list[str]:
    return [piece for piece, _ in opened(name).pre_tokenizer.pre_tokenize_str(text)]


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
DIGITS = pre_tokenizers.Digits(individual_digits=True)
WITH_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
# As the tokenizer.json of the models that the names come from have it.
PUBLISHED = {
    "gpt-2": WITH_GPT2,
    "mpt": WITH_GPT2,
    "smollm": pre_tokenizers.Sequence([DIGITS, WITH_GPT2]),
    "starcoder": pre_tokenizers.Sequence([DIGITS, WITH_GPT2]),
    "command-r": pre_tokenizers.Sequence([DIGITS, WITH_GPT2]),
}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", PUBLISHED)
def test_pieces_are_those_of_the_published_tokenizer(name: str, text: str) -> None:
    expected = [piece for piece, _ in PUBLISHED[name].pre_tokenize_str(text)]
    assert pieces(name, text) == expected


PATTERNS = {
    "llama-bpe": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "qwen2": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "tekken": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}


def as_bytes(text: str) -> str:
    return "".join(piece for piece, _ in BYTES.pre_tokenize_str(text))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", PATTERNS)
def test_pieces_are_those_of_another_engine_of_patterns(name: str, text: str) -> None:
    expected = [as_bytes(piece) for piece in regex.findall(PATTERNS[name], text)]
    assert pieces(name, text) == expected


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("llama-bpe", "12345", ["123", "45"]),
        ("qwen2", "12345", ["1", "2", "3", "4", "5"]),
        ("deepseek-llm", "abc 12\nx", ["abc", "Ġ", "1", "2", "Ċ", "x"]),
        ("deepseek-coder", "a, b", ["a", ",", "Ġb"]),
        ("deepseek-v3", "12345", ["123", "45"]),
        ("tekken", "HTTPServer", ["HTTPServer"]),
        ("tekken", "camelCase", ["camel", "Case"]),
        ("gpt-4o", "iPhone's 1234", ["i", "Phone's", "Ġ", "123", "4"]),
        ("falcon", "12345", ["123", "45"]),
        ("viking", "ab, 12", ["ab", ",", "Ġ", "1", "2"]),
    ],
)
def test_pieces_by_hand(name: str, text: str, expected: list[str]) -> None:
    assert pieces(name, text) == expected


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=40))
@pytest.mark.parametrize("name", sorted(gguf_splits._RULES))
def test_no_rule_loses_a_character(name: str, text: str) -> None:
    assert "".join(pieces(name, text)) == as_bytes(text)


@pytest.mark.parametrize("name", ["unknown-rule", "", "GPT-2", None])
def test_what_is_not_known_is_refused_by_name(name: str | None) -> None:
    with pytest.raises(ModelLoadError, match=r"tokenizer\.ggml\.pre.*tokenizer="):
        opened(name)  # type: ignore[arg-type]


def test_texts_are_composed_where_the_models_tokenizer_does_so() -> None:
    assert opened("qwen2").normalizer.normalize_str("e\u0301") == "\u00e9"
    assert opened("smollm").normalizer is None


def test_the_starter_model_of_an_older_version_is_made_anew_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import json
    import shutil

    from cotrt.models import starter

    whole = starter.ensure()
    monkeypatch.setenv("COTRT_HOME", str(tmp_path))
    folder = tmp_path / starter.NAME
    shutil.copytree(whole, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    mark = json.loads((folder / "cotrt-starter.json").read_text())
    del mark["conversion"]
    (folder / "cotrt-starter.json").write_text(json.dumps(mark))
    old = Tokenizer.from_file(str(folder / "tokenizer.json"))
    old.pre_tokenizer = WITH_GPT2
    old.save(str(folder / "tokenizer.json"))
    monkeypatch.setattr(starter, "_build", lambda *_: pytest.fail("built from the network"))

    assert not starter.is_ready()
    assert starter.ensure() == folder
    assert starter.is_ready()
    made = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "Steps:\n\n1. Take 1234567 eggs"
    assert (
        made.encode(text).ids == Tokenizer.from_file(str(whole / "tokenizer.json")).encode(text).ids
    )
    assert made.encode(text).ids != old.encode(text).ids
