"""`generate`, `submit` and `chat`: prompts of every kind, checks before anything runs, errors."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from api_helpers import Gate, Nan, counting, is_idle, letters, scripted

from cotrt import (
    LLM,
    InvalidRequestError,
    KVCacheExhaustedError,
    NumericsError,
    PromptTooLongError,
    SamplingParams,
)
from cotrt.testing import ScriptedModel

SHORT = SamplingParams(max_tokens=3)


def test_prompts_of_every_kind_in_order():
    with scripted(counting) as llm:
        branch = llm.branch("ab")
        ids = [97, 98]
        outputs = llm.generate(["ab", ids, {"prompt_token_ids": ids}, branch, (97, 98)], SHORT)
        assert [o.prompt for o in outputs] == ["ab", None, None, None, None]
        assert all(o.prompt_token_ids == ids for o in outputs)
        assert {o.outputs[0].text for o in outputs} == {"cde"}
        assert len({o.request_id for o in outputs}) == 5 and all(o.finished for o in outputs)
        assert llm.generate(ids, SHORT)[0].prompt_token_ids == ids
        assert llm.generate(np.array(ids), SHORT)[0].prompt_token_ids == ids
        assert llm.generate(np.array([ids, ids]), SHORT)[1].prompt_token_ids == ids
        assert branch.text == "abcde"


def test_a_submission_is_a_sequence_of_generations_and_a_handle():
    with scripted() as llm:
        work = llm.submit(["a", "b"], SamplingParams(n=2, max_tokens=4))
        assert len(work) == 4 and len(work[1:3]) == 2
        text = "".join(chunk.text for chunk in work[3])
        outputs = work.result()
        assert [g.result().index for g in work] == [0, 1, 0, 1]
        assert outputs[1].outputs[1].text == text == work[3].result().text
        assert work.done
        metrics = outputs[0].metrics
        assert metrics.arrival_time <= metrics.first_token_time <= metrics.finished_time


def test_defaults_are_16_tokens_in_generate_and_no_limit_for_branches():
    with scripted(counting, max_model_len=50) as llm:
        assert len(llm.generate("a")[0].outputs[0].token_ids) == 16
        none = llm.generate("a", SamplingParams(max_tokens=None))[0].outputs[0]
        assert len(none.token_ids) == 49 and none.finish_reason == "length"
        assert len(llm.branch("a").generate().result().token_ids) == 49
        zero = llm.generate("a" * 50, SamplingParams(max_tokens=0))[0].outputs[0]
        assert (zero.token_ids, zero.text, zero.finish_reason) == ([], "", "length")
        more = llm.generate("a" * 48, SamplingParams(max_tokens=9))[0].outputs[0]
        assert len(more.token_ids) == 2 and more.finish_reason == "length"


@pytest.mark.parametrize(
    ("prompts", "params", "error", "says"),
    [
        (["a", "b" * 60], SHORT, PromptTooLongError, "prompt 1: .*60.*max_model_len=50"),
        (["a", "b" * 50], SHORT, PromptTooLongError, "prompt 1: .*no room"),
        (["a", [1, 400]], SHORT, InvalidRequestError, "prompt 1: token id 400.* 319"),
        (["a", [1, -1]], SHORT, InvalidRequestError, "prompt 1: token id -1"),
        (["a", [1, True]], SHORT, InvalidRequestError, "prompt 1: token id True"),
        (["a", [1, 1.5]], SHORT, InvalidRequestError, "prompt 1: token id 1.5"),
        (["a", 3.5], SHORT, InvalidRequestError, "prompt 1: .*float"),
        (["a", ""], SHORT, InvalidRequestError, "prompt 1: .*no token"),
        (["a", {"prompt": "b"}], SHORT, InvalidRequestError, "prompt 1: .*prompt_token_ids"),
        (["a", "b"], [SHORT], InvalidRequestError, "1 sampling_params for 2 prompts"),
        (["a", "b"], [SHORT, {"n": 1}], InvalidRequestError, "prompt 1: .*SamplingParams"),
        (
            ["a", "b"],
            [SHORT, SamplingParams(stop_token_ids=[320])],
            InvalidRequestError,
            "prompt 1: stop_token_ids holds 320",
        ),
        (["b" * 60], SHORT, PromptTooLongError, "^60 tokens"),
        (b"abc", SHORT, InvalidRequestError, "bytes"),
    ],
)
def test_the_first_bad_prompt_raises_naming_its_index_and_nothing_runs(
    prompts, params, error, says
):
    with scripted(counting, max_model_len=50) as llm:
        with pytest.raises(error, match=says):
            llm.generate(prompts, params)
        assert llm.metrics["generated_tokens"] == 0 and is_idle(llm)


def test_what_the_pool_can_never_hold_is_refused_with_the_numbers():
    model = ScriptedModel(counting, vocab_size=300, eos_token_id=0)
    with LLM(model, kv_cache_memory_bytes=16 * 4 * 4, max_model_len=500) as llm:
        with pytest.raises(KVCacheExhaustedError, match=r"100 tokens.*7 .*16.* 4"):
            llm.generate(["a", "b" * 100], SHORT)
        assert llm.generate("a", SHORT)[0].outputs[0].text == "bcd"


def test_a_prompt_that_fails_later_raises_after_the_rest_with_the_outputs():
    def probs(ids):
        bad = ids[0] == ord("!") and len(ids) == 4
        return {98: Nan()} if bad else letters(ids)

    with scripted(probs) as llm:
        with pytest.raises(NumericsError, match="NaN") as caught:
            llm.generate(["abc", "!bc", "xyz"], SamplingParams(max_tokens=20, n=2))
        first, second, third = caught.value.outputs
        assert second is None and len(first.outputs) == len(third.outputs) == 2
        assert len(third.outputs[0].token_ids) == 20
        assert is_idle(llm)


def test_cancelling_a_submission_ends_all_its_outputs():
    gate = Gate()
    with scripted(gate) as llm:
        work = llm.submit(["a", "b"], SamplingParams(n=3, max_tokens=100_000))
        next(iter(work[0]))
        work.cancel()
        outputs = work.result()
        assert {c.finish_reason for o in outputs for c in o.outputs} == {"abort"}
        assert is_idle(llm)


def test_explicit_params_are_taken_as_they_are_and_overrides_start_from_the_defaults(
    tmp_path, rig_folder
):
    folder = shutil.copytree(rig_folder, tmp_path / "rig")
    settings = {"temperature": 0.0, "top_k": 3, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    with LLM(folder, dtype="float32", kv_cache_memory_bytes=1 << 26) as llm:
        defaults = llm._runtime.defaults
        assert (defaults.temperature, defaults.top_k) == (0.0, 3)
        assert llm._runtime.params(None, {"top_p": 0.5}).top_k == 3
        assert llm._runtime.params(SamplingParams(), {}).top_k == 0
        assert llm.generate("go:")[0].outputs[0].text == " ABCDEFGHIJ 🦊"
    with LLM(
        folder, dtype="float32", kv_cache_memory_bytes=1 << 26, generation_config="vllm"
    ) as llm:
        assert llm._runtime.defaults.temperature == 1.0


def test_num_cached_tokens_counts_what_was_there_or_being_computed():
    with scripted(counting) as llm:
        first = llm.generate("a" * 40, SHORT)[0]
        again = llm.generate("a" * 40, SHORT)[0]
        assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 32)  # whole blocks
        one, two = llm.generate(["b" * 40] * 2, SHORT)
        assert sorted([one.num_cached_tokens, two.num_cached_tokens]) == [0, 39]


def test_a_progress_bar_shows_on_a_terminal_alone(monkeypatch, capsys):
    import sys

    with scripted(counting) as llm:
        llm.generate(["a", "b"], SHORT)
        assert capsys.readouterr() == ("", "")
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
        gate = Gate()
        gate.shut()
        with scripted(gate) as held:
            import threading

            threading.Timer(0.05, gate.open.set).start()
            assert len(held.generate(["a", "b"], SHORT)) == 2
        out, shown = capsys.readouterr()
        assert out == "" and "prompts" in shown and "2/2" in shown
        llm.generate(["a", "b"], SHORT, use_tqdm=False)
        assert capsys.readouterr() == ("", "")
