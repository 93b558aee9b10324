"""The three parameter models: types, ranges, messages, and what was given or not."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pydantic import ValidationError

from cotrt.options.sampling import BeamSearchParams, SamplingParams, StructuredOutputs


def refused(**fields: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        SamplingParams(**fields)
    return str(caught.value)


def test_defaults_are_the_documented_ones() -> None:
    assert SamplingParams().model_dump() == {
        "n": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "seed": None,
        "max_tokens": None,
        "min_tokens": 0,
        "stop": (),
        "stop_token_ids": (),
        "include_stop_str_in_output": False,
        "ignore_eos": False,
        "logit_bias": None,
        "allowed_token_ids": None,
        "bad_words": (),
        "logprobs": None,
        "prompt_logprobs": None,
        "skip_special_tokens": True,
        "structured_outputs": None,
        "priority": 0,
    }


@pytest.mark.parametrize(
    ("field", "low", "high", "below", "above"),
    [
        ("n", 1, 1024, 0, 1025),
        ("temperature", 0, 100, -0.001, 100.5),
        ("top_p", 1e-9, 1, 0, 1.0001),
        ("top_k", -1, 2**31 - 1, -2, 2**31),
        ("min_p", 0, 1, -0.1, 1.1),
        ("presence_penalty", -2, 2, -2.1, 2.1),
        ("frequency_penalty", -2, 2, -2.1, 2.1),
        ("repetition_penalty", 1e-9, 10, 0, 10.1),
        ("seed", -(2**63), 2**64 - 1, -(2**63) - 1, 2**64),
        ("max_tokens", 0, 2**31 - 1, -1, 2**31),
        ("min_tokens", 0, 2**31 - 1, -1, 2**31),
        ("logprobs", 0, 20, -1, 21),
        ("prompt_logprobs", 0, 20, -1, 21),
    ],
)
def test_ranges(field: str, low: float, high: float, below: float, above: float) -> None:
    for value in (low, high):
        kept = getattr(SamplingParams(**{field: value}), field)
        assert kept == (0 if (field, value) == ("top_k", -1) else value)
    for value in (below, above):
        message = refused(**{field: value})
        assert field in message and repr(value) in message and ("[" in message or "(" in message)


FLOATS = ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"]
INTS = ["n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "priority"]


@pytest.mark.parametrize("field", FLOATS + INTS)
def test_strings_and_bools_are_not_numbers(field: str) -> None:
    for value in ("1", True, False, [1], b"1"):
        message = refused(**{field: value})
        assert field in message and repr(value) in message


@pytest.mark.parametrize("field", FLOATS)
def test_an_int_is_a_float_and_nan_and_infinity_are_not(field: str) -> None:
    value = getattr(SamplingParams(**{field: 1}), field)
    assert value == 1.0 and type(value) is float
    for bad in (math.nan, math.inf, -math.inf):
        assert "finite" in refused(**{field: bad})
    refused(**{field: 10**400})


@pytest.mark.parametrize("field", INTS)
def test_a_float_is_not_an_int(field: str) -> None:
    assert field in refused(**{field: 1.0})


@pytest.mark.parametrize(
    "field", ["ignore_eos", "include_stop_str_in_output", "skip_special_tokens"]
)
def test_flags_are_bools(field: str) -> None:
    for value in (0, 1, "true", None):
        assert field in refused(**{field: value})


def test_unknown_fields_are_errors() -> None:
    assert "best_of" in refused(best_of=2)


def test_stop_is_a_tuple_of_non_empty_strings() -> None:
    assert SamplingParams(stop="\n").stop == ("\n",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop=[]).stop == SamplingParams(stop=None).stop == ()
    assert len(SamplingParams(stop=[str(i) for i in range(64)]).stop) == 64
    assert "64" in refused(stop=[str(i) for i in range(65)])
    for bad in ("", ["a", ""], [1], 3, b"x", [b"x"]):
        assert "stop" in refused(stop=bad)


def test_token_ids() -> None:
    params = SamplingParams(
        stop_token_ids=[5, 0], allowed_token_ids=(1, 2), logit_bias={3: -100, 4: 2.5}
    )
    assert params.stop_token_ids == (5, 0)
    assert params.allowed_token_ids == (1, 2)
    assert params.logit_bias == {3: -100.0, 4: 2.5}
    for bad in ([-1], [True], ["1"], 5, [2**31]):
        assert "stop_token_ids" in refused(stop_token_ids=bad)
        assert "allowed_token_ids" in refused(allowed_token_ids=bad)
    assert "at least one" in refused(allowed_token_ids=[])
    for bad in ({"1": 1.0}, {1: "1"}, {1: True}, {-1: 1.0}, {1: 101}, {1: math.nan}, [1]):
        assert "logit_bias" in refused(logit_bias=bad)


def test_bad_words_are_texts() -> None:
    assert SamplingParams(bad_words=["no", "never ever"]).bad_words == ("no", "never ever")
    assert "bad_words" in refused(bad_words=[""])


def test_min_tokens_is_at_most_max_tokens() -> None:
    message = refused(min_tokens=5, max_tokens=4)
    assert "min_tokens" in message and "max_tokens" in message
    assert SamplingParams(min_tokens=20).max_tokens is None


def test_frozen() -> None:
    with pytest.raises(ValidationError):
        SamplingParams().n = 2  # type: ignore[misc]


def test_max_tokens_unset_and_none_are_told_apart() -> None:
    assert not SamplingParams().is_max_tokens_set
    assert SamplingParams(max_tokens=None).is_max_tokens_set
    assert SamplingParams(max_tokens=0).is_max_tokens_set
    assert not SamplingParams(n=2).replace(n=3).is_max_tokens_set
    assert SamplingParams(max_tokens=None).replace(n=3).is_max_tokens_set


def test_replace_checks_and_keeps_the_rest() -> None:
    params = SamplingParams(stop="x", temperature=0.5, top_k=-1)
    changed = params.replace(top_p=0.9, stop=["y", "z"])
    assert (changed.temperature, changed.top_p, changed.stop) == (0.5, 0.9, ("y", "z"))
    with pytest.raises(ValidationError):
        params.replace(top_p=2)
    with pytest.raises(ValidationError):
        params.replace(topp=0.5)


def test_structured_outputs_do_not_go_with_what_contradicts_them() -> None:
    wanted = StructuredOutputs(regex="a+")
    message = refused(structured_outputs=wanted, stop="b", ignore_eos=True)
    assert "ignore_eos does not go with structured_outputs" in message
    assert SamplingParams(structured_outputs=wanted, stop="b", bad_words=["c"]).stop == ("b",)


def test_replace_knows_fields_by_the_names_that_they_are_given_by() -> None:
    changed = StructuredOutputs(json={"type": "object"}).replace(thought="open")
    assert changed == StructuredOutputs(json={"type": "object"}, thought="open")


def test_structured_outputs_name_exactly_one_grammar() -> None:
    assert StructuredOutputs(json={"type": "object"}).json_schema == {"type": "object"}
    assert StructuredOutputs(choice=["a", "b"]).choice == ("a", "b")
    for bad in ({}, {"regex": "a", "choice": ["b"]}, {"choice": []}, {"xml": "a"}, {"regex": 1}):
        with pytest.raises(ValidationError):
            StructuredOutputs(**bad)


def test_beam_search_params() -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=8)
    assert (params.length_penalty, params.ignore_eos, params.temperature) == (1.0, False, 0.0)
    bad: list[dict[str, Any]] = [
        {"beam_width": 0},
        {"max_tokens": 0},
        {"max_tokens": None},
        {"beam_width": True},
        {"length_penalty": math.nan},
        {"temperature": "0"},
        {"top_p": 0.5},
    ]
    for fields in bad:
        with pytest.raises(ValidationError):
            BeamSearchParams(**({"beam_width": 2, "max_tokens": 2} | fields))
    with pytest.raises(ValidationError):
        BeamSearchParams(beam_width=2)  # type: ignore[call-arg]
