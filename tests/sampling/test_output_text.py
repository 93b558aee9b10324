"""Detokenizer and stop checker together: stops across tokens, special tokens, what is shown."""

from __future__ import annotations

from typing import Any

import pytest
from sampling_helpers import ByteTokenizer, WordTokenizer

from cotrt.options.sampling import SamplingParams
from cotrt.sampling.output_text import OutputText
from cotrt.sampling.stop import StopMatch

WORDS = [" ABC", "DEF", "GH", "I", "J", "<end>", "<pad>"]
TOKENIZER = WordTokenizer(WORDS)
END = 5


def output(**fields: Any) -> OutputText:
    return OutputText(TOKENIZER, SamplingParams(**fields))


@pytest.mark.parametrize(("include", "text"), [(False, " ABCD"), (True, " ABCDEFG")])
def test_stop_that_starts_and_ends_inside_tokens(include: bool, text: str) -> None:
    for stop in ("EFG", ["zzz", *map(str, range(18)), "EFG"]):
        made = output(stop=stop, include_stop_str_in_output=include)
        assert made.append([0, 1]) is None
        assert made.append([2, 3, 4]) == StopMatch("EFG", 1)
        assert made.text == text and made.take() + made.finish() == text


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("include", [True, False])
def test_special_token_as_a_stop_is_seen_though_it_is_skipped(skip: bool, include: bool) -> None:
    made = output(stop=["<end>"], skip_special_tokens=skip, include_stop_str_in_output=include)
    assert made.append([0]) is None
    assert made.append([END]) == StopMatch("<end>", 1)
    assert made.text == (" ABC<end>" if include else " ABC")


def test_special_tokens_are_hidden_with_and_without_stops() -> None:
    for stop in ((), ("zz",)):
        made = output(stop=stop)
        made.append([0, 6, 1, 6])
        assert made.finish() == made.text == " ABCDEF"
        shown = output(stop=stop, skip_special_tokens=False)
        shown.append([0, 6, 1])
        shown.finish()
        assert shown.text == " ABC<pad>DEF"


@pytest.mark.parametrize("skip", [True, False])
def test_the_token_that_ended_it_is_shown_only_when_asked_for(skip: bool) -> None:
    for include, token_id, text in (
        (False, 3, " ABC"),
        (True, 3, " ABCI"),
        (False, END, " ABC"),
        (True, END, " ABC" if skip else " ABC<end>"),
    ):
        made = output(skip_special_tokens=skip, include_stop_str_in_output=include)
        made.append([0])
        assert made.append_end(token_id) is None
        assert made.finish() == made.text == text


def test_end_token_may_be_what_a_stop_string_says() -> None:
    made = output(stop="<end>")
    made.append([0])
    assert made.append_end(END) == StopMatch("<end>", 1)
    assert made.text == " ABC"


def test_stops_do_not_count_before_min_tokens() -> None:
    made = output(stop="I", min_tokens=2)
    assert made.append([3]) is None and made.append([3]) is None
    assert made.append([3]) == StopMatch("I", 1)
    assert made.text == "II"


def test_streaming_holds_back_characters_and_stops() -> None:
    ids = list("é🦊 stop".encode())
    made = OutputText(ByteTokenizer(), SamplingParams(stop=" stop"))
    taken = []
    for token_id in ids:
        made.append([token_id])
        taken.append(made.take())
    assert [piece for piece in taken if piece] == ["é", "🦊"]
    assert made.match and made.text == "é🦊"


def test_incomplete_character_at_the_end() -> None:
    made = OutputText(ByteTokenizer(), SamplingParams())
    made.append([97, 0xF0, 0x9F])
    assert made.take() == "a" and made.finish() == "\ufffd" and made.text == "a\ufffd"


def test_padding_ids_have_no_text_and_harm_nothing() -> None:
    made = output(stop="FG")
    assert made.append([0, 999, 1]) is None
    assert made.append([2]) == StopMatch("FG", 1)
    assert made.text == " ABCDE"
