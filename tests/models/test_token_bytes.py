"""Bytes of single tokens: joined they are the bytes of the text."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokens import byte_tokenizer, piece_tokenizer

from cotrt.models.tokenizer import Tokenizer

TEXTS = [
    "hello",
    "naïve é",
    "日本 🦊!",
    "  two  spaces ",
    "\n\t\x00",
    "e\u0301",
    "<0xE2>",
    "\ufffd",
]


def opened(kind: str, folder: Path) -> Tokenizer:
    if kind in ("metaspace", "legacy"):
        folder = piece_tokenizer(folder / kind, style=kind)
    else:
        folder = byte_tokenizer(folder / kind)
    found = Tokenizer.from_folder(folder)
    assert found is not None
    return found


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["metaspace", "legacy", "bytes"])
def test_bytes_of_tokens_join_to_those_of_the_text(kind: str, text: str, tmp_path: Path) -> None:
    tokenizer = opened(kind, tmp_path)
    ids = tokenizer.encode_continuation(text, special=False)
    own = [tokenizer.token_bytes(token) for token in ids]
    assert b"".join(part or b"" for part in own) == text.encode()
    assert None not in own


def test_a_token_inside_a_character_has_its_own_byte(tmp_path: Path) -> None:
    for kind in ("metaspace", "legacy", "bytes"):
        tokenizer = opened(kind, tmp_path)
        ids = tokenizer.encode_continuation("🦊")
        assert [tokenizer.token_bytes(i) for i in ids] == [bytes([b]) for b in "🦊".encode()]


def test_special_and_added_tokens_have_the_bytes_of_their_spelling(tmp_path: Path) -> None:
    pieces, plain = opened("legacy", tmp_path), opened("bytes", tmp_path)
    assert [pieces.token_bytes(i) for i in (0, 1, 2)] == [b"<unk>", b"<s>", b"</s>"]
    assert [plain.token_bytes(i) for i in (256, 257, 258)] == [b"<|start|>", b"<|end|>", b"<think>"]


def test_ids_without_a_token_have_no_bytes(tmp_path: Path) -> None:
    for kind in ("metaspace", "bytes"):
        tokenizer = opened(kind, tmp_path)
        assert [tokenizer.token_bytes(i) for i in (-1, tokenizer.vocab_size, 1 << 40)] == [b""] * 3


def test_an_object_tells_bytes_by_its_text_or_in_its_own_way() -> None:
    class Bytes:
        def encode(self, text: str) -> list[int]:
            return list(text.encode())

        def decode(self, ids: list[int]) -> str:
            return bytes(ids).decode(errors="replace")

    class Single(Bytes):
        def decode_single_token_bytes(self, token: int) -> bytes:
            return bytes([token])

    class Pieces(Bytes):
        def convert_ids_to_tokens(self, token: int) -> str:
            return f"<0x{token:02X}>"

    for made, wanted in ((Bytes(), None), (Single(), b"\xf0"), (Pieces(), b"\xf0")):
        tokenizer = Tokenizer.from_object(made)
        assert tokenizer.token_bytes(97) == b"a"
        assert tokenizer.token_bytes(0xF0) == wanted
