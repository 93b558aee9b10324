"""Arguments of a wrong kind are an InvalidRequestError that says what was wanted."""

from __future__ import annotations

import numpy as np
import pytest
from api_helpers import counting, scripted
from pydantic import ValidationError

import cotrt
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


def test_numbers_of_numpy_are_numbers_and_bools_are_not():
    with scripted(counting) as llm:
        params = SamplingParams(max_tokens=np.int64(3), temperature=np.float32(0.5), top_p=1)
        assert (type(params.max_tokens), type(params.temperature)) == (int, float)
        root = llm.branch([np.int64(97)]).extend([np.int64(98), 99])
        assert root.text == "abc"
        assert len(root.fork(np.int64(2), at=np.int16(1))) == 2
        assert root.truncate(np.int64(2)).token_ids == [97, 98]
        assert root.fork(2).truncate(np.uint8(1))[1].text == "a"
        for prompts in ([[np.int64(97)]], [np.int64(97)], np.array([97])):
            assert llm.generate(prompts, params)[0].outputs[0].text == "bcd"
        assert root.score([np.int64(99)]).result().token_ids == [99]
        root.keep(np.float32(0))
        for bad in (True, np.bool_(True), 2.0, "2", np.array([1, 2])):
            for call in (root.fork, root.truncate, lambda x: root.extend([x])):
                with pytest.raises(InvalidRequestError):
                    call(bad)
        for bad in (True, np.bool_(True), np.float32("nan"), "1", None):
            with pytest.raises(ValidationError):
                SamplingParams(temperature=bad)
        with pytest.raises(InvalidRequestError, match="a number alone"):
            llm.generate(np.array(3))


def test_chat_options_of_another_kind_are_refused_by_name(smol):
    messages = [{"role": "user", "content": "Hi"}]
    for options, words in (
        ({"tools": 5}, "tools=5: must be a list"),
        ({"tools": {"type": "function"}}, "must be a list of tool definitions"),
        ({"chat_template_kwargs": 5}, "chat_template_kwargs=5: must be a dict"),
        ({"add_generation_prompt": "no"}, "add_generation_prompt='no': must be True or False"),
        ({"continue_final_message": 1}, "continue_final_message=1: must be True or False"),
    ):
        with pytest.raises(InvalidRequestError, match=words):
            smol.chat(messages, **options)
    with pytest.raises(InvalidRequestError, match="tools=5: must be a list"):
        smol.start_chat(tools=5)


@pytest.mark.parametrize("timeout", ["x", True, float("nan")])
def test_a_timeout_that_is_no_number_is_refused(timeout):
    with scripted(counting) as llm:
        work = llm.branch("a").generate(max_tokens=2)
        for _ in range(2):  # running or done
            with pytest.raises(InvalidRequestError, match="must be a number of seconds"):
                work.result(timeout=timeout)
            assert work.result(timeout=float("inf")).text == "bc"


def test_what_is_no_branch_makes_no_branches_and_no_page(tmp_path):
    with pytest.raises(InvalidRequestError, match="item 0 is int 1, not a Branch"):
        Branches([1])
    with pytest.raises(InvalidRequestError, match="item 0 is str 'a', not a Branch"):
        Branches("ab")
    with pytest.raises(InvalidRequestError, match="give a list of branches"):
        Branches(3)
    with scripted(counting) as llm:
        with pytest.raises(InvalidRequestError, match="not of a Branch: give the result"):
            cotrt.viewer.save_html(llm.branch("a"), tmp_path / "x.html")
        assert not (tmp_path / "x.html").exists()


def test_reprs_are_short_and_say_what_there_is(smol):
    with scripted(counting) as llm:
        assert repr(llm) == "<LLM ScriptedModel: scripted kernels, max_model_len 262144>"
        branch = llm.branch("a")
        work = branch.generate(max_tokens=2)
        work.result()
        assert repr(work) == "<Generation: length, 2 tokens>"
        pair = branch.fork(2).generate(max_tokens=1)
        pair.result()
        assert repr(pair) == "<Generations: 2 outputs, 2 done>"
        handle = llm.submit(["a"])
        handle.result()
        assert repr(handle) == "<Submission: 1 outputs, 1 done>"
        scored = branch.score("b")
        scored.result()
        assert repr(scored) == "<Handle: done>"
    assert repr(smol).startswith("<LLM '")
    for given in ({"json": {"type": "object"}}, {"choice": ["a", "b"]}, {"regex": "a"}):
        made = StructuredOutputs(**given)
        assert eval(repr(made)) == made


def test_a_chat_has_the_rendered_prompt_as_its_prompt(smol):
    messages = [{"role": "user", "content": "Hi <|im_end|>"}]
    output = smol.chat(messages, SamplingParams(max_tokens=1))[0]
    assert output.prompt is not None and output.prompt.endswith("<|im_start|>assistant\n")
    assert "Hi <|im_end|>" in output.prompt
    assert smol.tokenizer.decode(output.prompt_token_ids) == output.prompt
