"""Traps of stop strings, ends, padding ids, BOS and lengths, on a model that says known text."""

from __future__ import annotations

import json
import shutil

import pytest
from api_helpers import (
    ABCDEFGHIJ,
    COLON,
    END,
    FOX,
    RIG_CHAIN,
    make_rig,
    put_bos_first,
)
from isolation import shared_fixture

from cotrt import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=40)


def open_rig(folder, **options):
    return LLM(folder, dtype="float32", kv_cache_memory_bytes=1 << 24, **options)


def test_the_rig_says_what_it_should(rig):
    output = rig.generate("go:", GREEDY)[0].outputs[0]
    assert output.text == " ABCDEFGHIJ 🦊"
    assert output.token_ids == [*ABCDEFGHIJ, *FOX, END]
    assert (output.finish_reason, output.stop_reason) == ("stop", None)


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stop", ["EFG", ["zz", "EFG"], ["EFG", *map(str, range(19))]])
def test_a_stop_string_that_starts_and_ends_inside_tokens_cuts_the_text_alone(rig, stop, include):
    params = GREEDY.replace(
        stop=stop, include_stop_str_in_output=include, logprobs=1, n=2, temperature=1.0
    )
    for output in rig.generate("go:", params)[0].outputs:
        assert output.text == (" ABCDEFG" if include else " ABCD")
        # Every sampled token counts, the one that completed the stop string included.
        assert output.token_ids == ABCDEFGHIJ[:3]
        assert len(output.logprobs) == len(output.token_ids)
        assert all(t in entry for t, entry in zip(output.token_ids, output.logprobs))
        assert (output.finish_reason, output.stop_reason) == ("stop", "EFG")


def test_no_stop_strings_never_stop_and_an_empty_one_is_refused(rig):
    assert rig.generate("go:", GREEDY.replace(stop=[]))[0].outputs[0].text.endswith("🦊")
    for stop in ("", ["x", ""]):
        with pytest.raises(ValueError, match="stop"):
            GREEDY.replace(stop=stop)


@pytest.mark.parametrize("skip", [False, True])
def test_a_stop_string_that_is_a_special_token_matches_though_it_is_skipped(rig, skip):
    params = GREEDY.replace(stop=["<|im_end|>"], ignore_eos=True, skip_special_tokens=skip)
    output = rig.generate("go:", params)[0].outputs[0]
    assert (output.finish_reason, output.stop_reason) == ("stop", "<|im_end|>")
    assert output.text == " ABCDEFGHIJ 🦊"
    shown = rig.generate("go:", params.replace(include_stop_str_in_output=True))[0].outputs[0]
    assert shown.text == " ABCDEFGHIJ 🦊<|im_end|>" and shown.stop_reason == "<|im_end|>"
    text = "".join(chunk.text for chunk in rig.branch("go:").generate(params))
    assert text == output.text


def test_a_stop_token_id_ends_the_text_before_its_own_and_is_named(rig):
    [i_id] = [57]
    output = rig.generate("go:", GREEDY.replace(stop_token_ids=[i_id]))[0].outputs[0]
    assert (output.text, output.stop_reason) == (" ABCDEFGH", i_id)
    assert output.token_ids == ABCDEFGHIJ[:4] and output.finish_reason == "stop"


X = ABCDEFGHIJ[2]  # the id in the middle of the chain


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "ends_at"),
    [
        ([END, X], None, None, X),  # a list in generation_config.json
        ([X, 5], None, None, X),  # that does not hold the tokenizer's
        (X, None, None, X),  # an int
        (None, [END, X], None, X),  # config.json alone
        (None, X, None, X),
        (None, None, "GHI-like", X),  # the tokenizer alone
        (None, None, None, END),  # no file names any but the tokenizer's own
        (X, END, None, X),
    ],
)
def test_every_declared_end_of_sequence_id_ends_it(
    rig_folder, tmp_path, generation, config, tokenizer, ends_at
):
    folder = shutil.copytree(rig_folder, tmp_path / "rig")
    settings = json.loads((folder / "config.json").read_text())
    settings.pop("eos_token_id")
    if config is not None:
        settings["eos_token_id"] = config
    (folder / "config.json").write_text(json.dumps(settings))
    if generation is not None:
        path = folder / "generation_config.json"
        path.write_text(json.dumps({"eos_token_id": generation}))
    if tokenizer is not None:
        path = folder / "tokenizer_config.json"
        named = json.loads(path.read_text())
        named["eos_token"] = json.loads((folder / "tokenizer.json").read_text())["model"]
        named["eos_token"] = next(t for t, i in named["eos_token"]["vocab"].items() if i == X)
        path.write_text(json.dumps(named))
    with open_rig(folder) as llm:
        branch = llm.branch("go:")
        output = branch.generate(GREEDY).result()
        assert output.token_ids[-1] == ends_at and branch.finished
        assert (output.finish_reason, output.stop_reason) == ("stop", None)
        expected = " ABCDEF" if ends_at == X else " ABCDEFGHIJ 🦊"
        assert output.text == expected
        # Any declared one is ignored when asked.
        more = llm.generate("go:", GREEDY.replace(ignore_eos=True, max_tokens=10))[0].outputs[0]
        assert len(more.token_ids) == 10 and more.finish_reason == "length"
        assert more.token_ids[:9] == [*ABCDEFGHIJ, *FOX, END]


def test_ids_beyond_the_tokenizer_have_no_text_and_stop_nothing(tmp_path):
    padding = 49152 + 60
    chain = [COLON, *ABCDEFGHIJ[:2], padding, *ABCDEFGHIJ[2:], END]
    folder = make_rig(tmp_path / "rig", chain, extra_vocab=64)
    with open_rig(folder) as llm:
        generation = llm.branch("go:").generate(GREEDY.replace(logprobs=5))
        text = "".join(chunk.text for chunk in generation)
        output = generation.result()
        assert text == output.text == " ABCDEFGHIJ"
        assert output.token_ids == chain[1:]
        assert all(len(entry) >= 5 for entry in output.logprobs)
        entry = output.logprobs[2]
        assert entry[padding].decoded_token == ""
        # A padding id may be given, too, and an id beyond the model's vocabulary may not.
        assert llm.generate([COLON, padding, COLON], GREEDY)[0].outputs[0].text == text
        with pytest.raises(ValueError, match="49215"):
            llm.branch([49152 + 64])


@pytest.fixture(scope="module")
def bos_folder(rig_folder, tmp_path_factory):
    """The rig with a tokenizer that puts BOS before every text, as its template does."""
    return put_bos_first(rig_folder, tmp_path_factory.mktemp("bos") / "rig")


def test_one_bos_in_chats_and_texts_none_in_ids_and_none_in_the_middle(bos_folder):
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(bos_folder)
    messages = [{"role": "user", "content": "Go go:"}]
    wanted = reference.apply_chat_template(messages, add_generation_prompt=True)
    wanted = wanted["input_ids"] if hasattr(wanted, "keys") else wanted
    template = reference.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    with open_rig(bos_folder) as llm:
        none = SamplingParams(max_tokens=0)
        assert llm.chat(messages, none)[0].prompt_token_ids == wanted
        assert llm.branch(messages).token_ids == wanted
        plain = llm.generate("Go go:", none)[0].prompt_token_ids
        assert plain == reference("Go go:")["input_ids"] and plain[0] == 1 and plain.count(1) == 1
        # Text that is templated already has its BOS.
        assert llm.generate(template, none)[0].prompt_token_ids == wanted
        assert llm.generate(plain[1:], none)[0].prompt_token_ids == plain[1:]
        assert (
            llm.branch("").token_ids == [1] and llm.branch("a").extend("b").token_ids.count(1) == 1
        )
        chat = llm.start_chat()
        for turn in range(3):
            chat.send(f"Go {turn}:", max_tokens=3).result()
        headers = reference.convert_tokens_to_ids(["<|im_start|>"]) * 1
        text = llm.tokenizer.render_chat(chat.messages[:-1])
        assert chat.branch.text.startswith(text)
        assert chat.branch.token_ids.count(headers[0]) == text.count("<|im_start|>")
    with open_rig(bos_folder) as llm:
        assert llm.branch("x").score(" y", given=" z").result().token_ids.count(1) == 0


@shared_fixture()
def endless(tmp_path_factory):
    """A rig that never stops, with a context of 128."""
    loop = [COLON, *ABCDEFGHIJ]
    folder = make_rig(
        tmp_path_factory.mktemp("endless"),
        [],
        probs={a: {b: 1.0} for a, b in zip(loop, [*loop[1:], COLON])},
        context=128,
    )
    with open_rig(folder) as llm:
        yield llm


MESSAGES = [{"role": "user", "content": "go:"}]


def test_max_tokens_left_out_none_0_and_1_mean_what_they_say(endless):
    def chat(**options):
        result = endless.chat(MESSAGES, SamplingParams(temperature=0, **options))[0]
        return len(result.prompt_token_ids), result.outputs[0]

    room, output = chat(max_tokens=None)
    assert len(output.token_ids) == 128 - room and output.finish_reason == "length"
    assert len(chat()[1].token_ids) == 128 - room
    assert len(endless.chat(MESSAGES)[0].outputs[0].token_ids) == 128 - room
    for number in (0, 1, 5):
        output = chat(max_tokens=number)[1]
        assert (len(output.token_ids), output.finish_reason) == (number, "length")
    assert chat(max_tokens=0)[1].text == ""
    outputs = [
        endless.generate("go:", SamplingParams(temperature=0, **options))[0].outputs[0]
        for options in ({}, {"max_tokens": None}, {"max_tokens": 0}, {"max_tokens": 1})
    ]
    assert [len(o.token_ids) for o in outputs] == [16, 126, 0, 1]
    echo = SamplingParams(max_tokens=0, prompt_logprobs=0)
    assert len(endless.generate("go:", echo)[0].prompt_logprobs) == 2
    root = endless.branch("go:")
    assert len(root.generate(temperature=0).result().token_ids) == 126


def test_the_chain_of_the_rig_is_made_of_the_tokens_it_says(rig):
    assert rig.tokenizer.encode("go:")[-1] == COLON
    assert rig.tokenizer.decode(RIG_CHAIN[1:-1]) == " ABCDEFGHIJ 🦊"
