"""Stop strings over pieces of text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotrt.sampling.stop import StopChecker


def feed(checker: StopChecker, pieces: list[str]) -> str | None:
    for piece in pieces:
        if match := checker.append(piece):
            return match.stop
    return None


@pytest.mark.parametrize(
    "pieces", [["ABCDEFGHIJ"], [" ABC", "DEF", "GH", "I", "J"], list("ABCDEFGHIJ")]
)
@pytest.mark.parametrize(("include", "text"), [(False, "ABCD"), (True, "ABCDEFG")])
def test_cut_inside_a_piece(pieces: list[str], include: bool, text: str) -> None:
    checker = StopChecker(["EFG"], include)
    assert feed(checker, pieces) == "EFG"
    assert checker.text.strip() == text


def test_the_stop_that_ends_first_wins_and_the_longest_of_equals() -> None:
    assert feed(StopChecker(["cde", "d"]), ["abcdef"]) == "d"
    checker = StopChecker(["c", "bc"])
    assert feed(checker, ["abcd"]) == "bc" and checker.text == "a"


def test_no_stops() -> None:
    checker = StopChecker([])
    assert feed(checker, ["ab", "", "c"]) is None
    assert checker.safe_text() == "abc" and checker.text == "abc"


def test_streamed_text_holds_back_what_may_become_a_stop() -> None:
    checker = StopChecker(["\n\nQ:", "###"])
    seen = []
    for piece in ["a#", "b\n", "\n", "Q", "c##", "#d"]:
        checker.append(piece)
        seen.append(checker.safe_text())
    assert seen == ["a", "#b", "", "", "\n\nQc", ""]
    assert checker.match and checker.match.stop == "###"
    assert checker.text == "a#b\n\nQc" and checker.finish() == ""


def test_finish_gives_what_was_held_back() -> None:
    checker = StopChecker(["###"])
    checker.append("a##")
    assert checker.safe_text() == "a" and checker.finish() == "##"


def test_hidden_text_is_matched_and_not_shown() -> None:
    for include, shown in ((False, "a"), (True, "a<end>")):
        checker = StopChecker(["<end>"], include)
        checker.append("a")
        assert checker.append("<end>", hidden=True)
        assert checker.text == checker.safe_text() == shown
    other = StopChecker(["b<end>c"])
    assert feed(other, ["ab"]) is None
    other.append("<x>", hidden=True)
    assert other.safe_text() == "ab"
    other.append("b")
    other.append("<end>", hidden=True)
    assert other.safe_text() == ""
    assert other.append("c") and other.text == "ab"


def test_text_taken_without_checking_can_begin_but_not_end_a_match() -> None:
    checker = StopChecker(["ab"])
    assert checker.append("xab a", check=False) is None
    assert checker.append("b") and checker.text == "xab "


def test_text_after_the_match_is_dropped() -> None:
    checker = StopChecker(["b"])
    checker.append("abc")
    checker.append("more")
    assert checker.text == "a"


@settings(deadline=None)
@given(
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=4),
    st.text("abc", max_size=30),
    st.lists(st.integers(1, 5), max_size=30),
    st.booleans(),
)
def test_pieces_do_not_matter(stops: list[str], text: str, sizes: list[int], include: bool) -> None:
    pieces, rest = [], text
    for size in sizes:
        pieces.append(rest[:size])
        rest = rest[size:]
    pieces.append(rest)
    ends = sorted((text.find(s) + len(s), -len(s), s) for s in stops if s in text)
    expected, stop = text, None
    if ends:
        end, _, stop = ends[0]
        expected = text[: end if include else end - len(stop)]
    checker = StopChecker(stops, include)
    streamed = ""
    for piece in pieces:
        checker.append(piece)
        streamed += checker.safe_text()
        assert expected.startswith(streamed)
    assert streamed + checker.finish() == checker.text == expected
    assert (checker.match and checker.match.stop) == stop
