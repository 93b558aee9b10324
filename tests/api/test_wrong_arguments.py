"""Arguments of a wrong kind are an InvalidRequestError that says what was wanted."""

from __future__ import annotations

import numpy as np
import pytest
from api_helpers import counting, scripted
from pydantic import ValidationError

from cotrt import Branches, InvalidRequestError, SamplingParams, StructuredOutputs

HALF = "a\ud800b"


def test_half_of_a_surrogate_pair_is_refused_wherever_text_is_taken(rig, smol):
    branch = rig.branch("go:")
    for call in (
        lambda: rig.branch(HALF),
        lambda: branch.extend(HALF),
        lambda: branch.score(HALF),
        lambda: branch.choose([HALF, "b"]),
        lambda: branch.score("b", given=HALF),
        lambda: smol.chat([{"role": "user", "content": HALF}]),
        lambda: smol.start_chat().send(HALF),
    ):
        with pytest.raises(InvalidRequestError, match="surrogate"):
            call()
    with pytest.raises(InvalidRequestError, match="prompt 1: .*surrogate"):
        rig.generate(["go:", HALF])
    assert branch.text == "go:"


@pytest.mark.parametrize("field", ["stop", "bad_words", "choice", "regex", "grammar", "json"])
def test_half_of_a_surrogate_pair_in_params_is_refused_like_any_bad_value(field):
    value = {"json": {"enum": [["a", HALF]]}, "choice": ["a", HALF]}.get(field, HALF)
    make = SamplingParams if field in ("stop", "bad_words") else StructuredOutputs
    with pytest.raises(ValidationError, match=rf"{field}[\s\S]*half of a surrogate pair"):
        make(**{field: value})


def test_an_empty_prompt_of_ids_says_that_there_is_nothing_to_go_on_from(smol):
    calls = (
        lambda: smol.generate([[]]),
        lambda: smol.branch([]).generate(),
        lambda: smol.branch("a").truncate(0).generate(),
    )
    bos = smol.tokenizer.bos_token_id
    for call in calls:
        with pytest.raises(InvalidRequestError, match=f"no token ids stays empty.*BOS, {bos}"):
            call()
    with scripted(counting) as llm, pytest.raises(InvalidRequestError, match="is no BOS token"):
        llm.generate("")


@pytest.mark.parametrize("prompt", [None, 3, {"a"}, {"role": "user", "content": "a"}, b"a"])
def test_a_root_of_something_else_is_refused(prompt):
    with scripted(counting) as llm, pytest.raises(InvalidRequestError):
        llm.branch(prompt)


def test_a_root_may_be_a_prompt_dict():
    with scripted(counting) as llm:
        assert llm.branch({"prompt_token_ids": [97, 98]}).text == "ab"


def test_one_message_that_is_no_list_is_refused(smol):
    with pytest.raises(InvalidRequestError, match="messages must be a list"):
        smol.chat({"role": "user", "content": "Hi"})


def test_options_and_params_of_another_kind_are_refused():
    with scripted(counting) as llm:
        branch = llm.branch("a")
        for options in (3, None, b"ab", np.array([97, 98]), np.array([])):
            with pytest.raises(InvalidRequestError):
                branch.choose(options)
        for params in (3, {"max_tokens": 3}):
            with pytest.raises(InvalidRequestError, match="sampling_params must be"):
                llm.generate(["a"], params)
        assert branch.choose(np.array([[98], [99]])).result().option == [98]


def test_a_branch_has_no_place_for_prompt_logprobs_and_says_where_they_are():
    with scripted(counting) as llm:
        branch = llm.branch("ab")
        for call in (branch.generate, Branches([branch]).generate):
            with pytest.raises(InvalidRequestError, match=r"llm\.generate"):
                call(max_tokens=1, prompt_logprobs=0)
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        assert len(llm.generate([branch], params)[0].prompt_logprobs) == 2
