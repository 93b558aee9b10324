"""Text of ids as they come."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sampling_helpers import ByteTokenizer, WordTokenizer

from cotrt.sampling.detokenizer import Detokenizer

TEXT = "naïve 日本語 🦊🦊 ok\n" * 8


class FallbackTokenizer:
    """Decodes as SentencePiece models do.

    Words begin with a space that is dropped at the start of a text, and a run of byte tokens
    (negative ids) that is not UTF-8 as a whole is one replacement character a byte.
    """

    words = (" hello", " world", "s")

    def encode(self, text: str) -> list[int]:
        return [byte - 256 for byte in text.encode()]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        parts: list[str] = []
        run = b""
        for token_id in [*ids, None]:
            if token_id is not None and token_id < 0:
                run += bytes([token_id + 256])
                continue
            if run:
                try:
                    parts.append(run.decode())
                except UnicodeDecodeError:
                    parts.append("\ufffd" * len(run))
                run = b""
            if token_id is not None:
                parts.append(self.words[token_id])
        return "".join(parts).removeprefix(" ")


def stream(detokenizer: Detokenizer, ids: Sequence[int]) -> list[str]:
    return [detokenizer.append([i]) for i in ids] + [detokenizer.flush()]


def test_characters_come_whole() -> None:
    pieces = stream(Detokenizer(ByteTokenizer()), list("a🦊b".encode()))
    assert pieces == ["a", "", "", "", "🦊", "b", ""]


@pytest.mark.parametrize("size", [1, 2, 7, 500])
def test_pieces_of_any_size_make_the_whole(size: int) -> None:
    ids = list(TEXT.encode())
    detokenizer = Detokenizer(ByteTokenizer())
    pieces = [detokenizer.append(ids[i : i + size]) for i in range(0, len(ids), size)]
    assert "".join(pieces) + detokenizer.flush() == TEXT
    assert not any("\ufffd" in piece for piece in pieces)


@example([0] * 24 + [128], 25, False)
@example([0xFF] * 60, 1, False)
@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 260), max_size=150), st.integers(1, 40), st.booleans())
def test_any_bytes_at_all(ids: list[int], size: int, skip: bool) -> None:
    tokenizer = ByteTokenizer()
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    pieces = [detokenizer.append(ids[i : i + size]) for i in range(0, len(ids), size)]
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(pieces) + detokenizer.flush() == whole


def test_a_long_run_of_damage_is_not_held_back_for_ever() -> None:
    detokenizer = Detokenizer(ByteTokenizer())
    text = "".join(detokenizer.append([0xFF]) for _ in range(1000))
    assert 940 < len(text) < 1000
    assert text + detokenizer.flush() == "\ufffd" * 1000


@pytest.mark.parametrize("damage", [[], [0x80], [0xF0, 0x9F], [300], [256] * 40, [0xFF] * 30])
def test_cost_is_linear(damage: list[int]) -> None:
    tokenizer = ByteTokenizer()
    ids = (list("plain text, 日本 ".encode()) + damage) * 100
    stream(Detokenizer(tokenizer), ids)
    assert tokenizer.num_decoded < 150 * len(ids)


def test_skipped_special_tokens_leave_no_trace() -> None:
    ids = [*b"ab", 256, *b"c", 257]
    assert "".join(stream(Detokenizer(ByteTokenizer()), ids)) == "abc"
    shown = Detokenizer(ByteTokenizer(), skip_special_tokens=False)
    assert "".join(stream(shown, ids)) == "ab<256>c<257>"


def test_ids_beyond_the_tokenizer_have_no_text() -> None:
    tokenizer = WordTokenizer(["x", "y"])
    assert stream(Detokenizer(tokenizer), [0, 99, 1]) == ["x", "", "y", ""]


class TestContext:
    def test_text_follows_the_context(self) -> None:
        assert Detokenizer(ByteTokenizer(), context_ids=list(b"abc" * 20)).append([100]) == "d"

    def test_leading_space_of_a_continuation_is_kept(self) -> None:
        tokenizer = FallbackTokenizer()
        assert "".join(stream(Detokenizer(tokenizer, context_ids=[0]), [1, 2])) == " worlds"
        assert "".join(stream(Detokenizer(tokenizer), [1, 2])) == "worlds"

    def test_character_begun_in_the_context_belongs_to_the_new_text(self) -> None:
        fox = list("🦊".encode())
        detokenizer = Detokenizer(ByteTokenizer(), context_ids=[97, *fox[:2]])
        assert stream(detokenizer, [*fox[2:], 98]) == ["", "🦊", "b", ""]

    @pytest.mark.parametrize("context", [list(b"a\xff"), list("a\ufffd".encode())])
    def test_replacement_character_of_the_context_is_not_repeated(self, context: list[int]) -> None:
        assert stream(Detokenizer(ByteTokenizer(), context_ids=context), [98]) == ["b", ""]
        assert stream(Detokenizer(ByteTokenizer(), context_ids=context), []) == [""]

    @pytest.mark.parametrize("length", range(1, 40))
    def test_runs_of_byte_tokens(self, length: int) -> None:
        tokenizer = FallbackTokenizer()
        ids = [0, *tokenizer.encode("🦊日é" * 8), 1, 2]
        detokenizer = Detokenizer(tokenizer, context_ids=ids[:length])
        whole = tokenizer.decode(ids)
        before = tokenizer.decode(ids[:length]).rstrip("\ufffd")
        text = "".join(stream(detokenizer, ids[length:]))
        # A context cut inside a character shows as damage in its own text, not in ours.
        assert whole.endswith(text) and "\ufffd" not in text
        assert len(text) >= len(whole) - len(before) - 1 or "\ufffd" in tokenizer.decode(
            ids[:length]
        )
