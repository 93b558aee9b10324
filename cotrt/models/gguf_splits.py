"""How a GGUF's byte-level vocabulary splits a text before its merges: ``tokenizer.ggml.pre``.

The name stands for a rule that is not in the file. With another rule the same text gets other ids,
and nothing says so. The rules are those of the tokenizers that the names were given to, by the list
of llama.cpp (``src/llama-vocab.cpp``); where the two differ, the tokenizer's own counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import ModelLoadError

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = r"[^\r\n\p{L}\p{N}]?"
_CASED_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = (
    rf"{_CASED}{_UPPER}*{_LOWER}+|{_CASED}{_UPPER}+{_LOWER}*|\p{{N}}|{_CASED_TAIL}"
)  # fmt: skip
_GPT4O = (
    rf"{_CASED}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_CASED}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{_CASED_TAIL}"
)
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _class(ranges: str) -> str:
    """A character class of code points, in hexadecimal."""
    ends = (one.split("-") for one in ranges.split())
    return "[" + "".join("-".join(chr(int(end, 16)) for end in pair) for pair in ends) + "]+"


# Letters that have a case, of the Unicode version that the tokenizer was made with.
_DEEPSEEK_LETTERS = r"\s?" + _class(
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 "
    "388-38A 38C 38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA "
    "1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 "
    "1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB "
    "1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 212A-212D "
    "212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 "
    "A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A "
    "FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"
)
_DEEPSEEK_SIGNS = r"\s?" + _class("21-2F 3A-7E FF01-FF0F FF1A-FF5E 2018-201F 3000-3002")
_DEEPSEEK_HAN = _class("4E00-9FA5 800-4E00 AC00-D7FF")
_DEEPSEEK_KANA = _class("4E00-9FA5 3040-309F 30A0-30FF")
# Punctuation of several scripts: none of it stands within a piece.
_BLOOM = " ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+"
_DIGIT = r"\p{N}"


@dataclass(frozen=True)
class _Rule:
    """A text is split by each pattern in turn.

    Attributes:
        patterns: regular expressions; what they match stands alone.
        nfc: the text is composed (Unicode NFC) first.
        whole: a piece that is a token itself is not merged from its bytes.
    """

    patterns: tuple[str, ...]
    nfc: bool = False
    whole: bool = False


_RULES: dict[str, _Rule] = {}
for _names, _rule in {
    "gpt-2 phi-2 jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code roberta-bpe "
    "gigachat mpt olmo jais trillion": _Rule((_GPT2,)),
    "smollm starcoder refact command-r codeshell exaone minerva-7b": _Rule((_DIGIT, _GPT2)),
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral": _Rule((_LLAMA3,), whole=True),
    "dbrx smaug-bpe chatglm-bpe glm4": _Rule((_LLAMA3,)),
    "qwen2 deepseek-r1-qwen megrez": _Rule((_QWEN2,), nfc=True),
    "stablelm2": _Rule((_QWEN2,)),
    "deepseek-llm": _Rule(
        (r"[\r\n]", _DEEPSEEK_LETTERS, _DEEPSEEK_SIGNS, r"\s+$", _DEEPSEEK_HAN, _DIGIT)
    ),
    "deepseek-coder": _Rule((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_HAN, _DIGIT)),
    "deepseek-v3 hunyuan-dense": _Rule((r"\p{N}{1,3}", _DEEPSEEK_KANA, _DEEPSEEK3)),
    "tekken": _Rule((_TEKKEN,), whole=True),
    "gpt-4o llama4": _Rule((_GPT4O,)),
    "default": _Rule((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "falcon": _Rule((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "bloom gpt3-finnish poro-chat": _Rule((_BLOOM,)),
    "viking": _Rule((_BLOOM, _DIGIT)),
}.items():
    _RULES.update((_name, _rule) for _name in _names.split())


def set_split(tokenizer: Any, name: str | None, where: str) -> None:
    """Give a byte-level tokenizer the rule of a name.

    Args:
        tokenizer: a `tokenizers.Tokenizer` over the file's vocabulary and merges.
        name: ``tokenizer.ggml.pre``; None where the file has none.
        where: the file, for errors.

    Raises:
        ModelLoadError: the name is unknown, or there is none.
    """
    from tokenizers import Regex, decoders, normalizers, pre_tokenizers

    rule = None if name is None else _RULES.get(name)
    if rule is None:
        what = "does not say how it splits texts (tokenizer.ggml.pre)"
        if name is not None:
            what = f"splits texts by the rule {name!r} (tokenizer.ggml.pre), which is unknown"
        raise ModelLoadError(
            f"{where}: its vocabulary {what}, and another rule gives other ids. Give tokenizer=, a "
            f"folder or hub id with the model's own; known rules: {', '.join(sorted(_RULES))}."
        )
    tokenizer.normalizer = normalizers.NFC() if rule.nfc else None
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rule.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.model.ignore_merges = rule.whole
