"""Traps of seeds, filters, penalties, ranges and the shape of logprobs."""

from __future__ import annotations

import math
import string

import numpy as np
import pytest
from api_helpers import COLON, letters, make_rig, run_program, scripted
from isolation import shared_fixture

from cotrt import LLM, SamplingParams

SMOL_PROMPT = "Once upon a time, in a village between two rivers, there lived an old clockmaker who"


# ---- seeds ------------------------------------------------------------------------------------


def test_a_seeded_request_never_changes_with_its_mates(smol):
    seeded = SamplingParams(seed=42, max_tokens=12)
    mate = SamplingParams(max_tokens=12)
    wanted = smol.generate(SMOL_PROMPT, seeded)[0].outputs[0].token_ids
    others = [f"{SMOL_PROMPT} {i}" for i in range(7)]
    mates = [
        smol.generate([SMOL_PROMPT, "Another"], [seeded, mate])[0],
        smol.generate([*others, SMOL_PROMPT], [mate] * 7 + [seeded])[7],
        smol.generate([SMOL_PROMPT, *others], [seeded] + [mate] * 7)[0],
    ]
    assert [m.outputs[0].token_ids for m in mates] == [wanted] * 3
    assert all(m.num_cached_tokens > 0 for m in mates)  # so each came through a prefix hit


def test_n_with_a_seed_is_n_choices_and_the_same_in_the_same_order_again(smol):
    params = SamplingParams(seed=42, n=4, max_tokens=8)
    first, second = (
        [o.token_ids for o in smol.generate(SMOL_PROMPT, params)[0].outputs] for _ in range(2)
    )
    assert first == second and len({tuple(ids) for ids in first}) >= 3


def test_unseeded_requests_differ_and_a_restart_repeats_them():
    program = """
    llm = scripted(letters)
    params = SamplingParams(max_tokens=8)
    texts = [llm.generate('abc', params)[0].outputs[0].text for _ in range(6)]
    texts += [r.outputs[0].text for r in llm.generate(['abc'] * 6, params)]
    print(*texts)
    """
    import textwrap

    first, second = (run_program(textwrap.dedent(program)).stdout for _ in range(2))
    assert first == second
    words = first.split()
    assert len(set(words[:6])) == 6 and len(set(words[6:])) == 6 and len(set(words)) == 12


# ---- filters ----------------------------------------------------------------------------------

P = {10: 0.4, 11: 0.3, 12: 0.2, 13: 0.1}
EQUAL = {20: 0.5, 21: 0.5}


@shared_fixture()
def dice(tmp_path_factory):
    """After ``:`` the four ids of P; after id 60 two equal ones."""
    folder = make_rig(tmp_path_factory.mktemp("dice"), [], probs={COLON: P, 60: EQUAL})
    with LLM(folder, dtype="float32", kv_cache_memory_bytes=1 << 24) as llm:
        yield llm


@pytest.mark.parametrize(
    ("params", "support"),
    [
        ({}, [10, 11, 12, 13]),
        ({"top_k": 2, "top_p": 0.5}, [10]),
        ({"top_k": 2, "top_p": 0.6}, [10, 11]),  # 0.4/0.7 does not reach 0.6
        ({"top_p": 1e-9}, [10]),
        ({"top_p": 1.0}, [10, 11, 12, 13]),
        ({"top_k": 0}, [10, 11, 12, 13]),
        ({"top_k": -1}, [10, 11, 12, 13]),
        ({"top_k": 10**6}, [10, 11, 12, 13]),
        ({"min_p": 1.0}, [10]),
        ({"min_p": 0.0}, [10, 11, 12, 13]),
        ({"min_p": 0.6}, [10, 11]),
        ({"min_p": 0.6, "temperature": 2.0}, [10, 11, 12]),  # sqrt(0.2/0.4) = 0.71
        ({"top_p": 0.65, "temperature": 2.0}, [10, 11, 12]),  # flatter: 0.33, 0.28, 0.23, 0.16
        ({"temperature": 0.0}, [10]),
    ],
)
def test_filters_keep_exactly_the_documented_tokens_at_the_right_rates(dice, params, support):
    temperature = params.get("temperature", 1.0)
    count = 1000
    counts: dict[int, int] = {}
    for seed in range(2):
        how = SamplingParams(**{"n": count, "max_tokens": 1, "seed": seed, **params})
        for output in dice.generate("go:", how)[0].outputs:
            [token] = output.token_ids
            counts[token] = counts.get(token, 0) + 1
    assert sorted(counts) == support
    if temperature:
        weights = {t: P[t] ** (1 / temperature) for t in support}
        for token, weight in weights.items():
            p = weight / sum(weights.values())
            sigma = math.sqrt(max(p * (1 - p), 1e-9) * 2 * count)
            assert abs(counts[token] - p * 2 * count) <= 4 * sigma + 1e-6


def test_of_two_equal_top_tokens_top_k_1_keeps_one(dice):
    params = SamplingParams(n=200, max_tokens=1, top_k=1, seed=3)
    tokens = {o.token_ids[0] for o in dice.generate([60], params)[0].outputs}
    assert len(tokens) == 1 and tokens < set(EQUAL)
    both = SamplingParams(n=200, max_tokens=1, seed=3)
    assert {o.token_ids[0] for o in dice.generate([60], both)[0].outputs} == set(EQUAL)


# ---- penalties --------------------------------------------------------------------------------


def numpy_model(logits_of, prompt, count, *, presence=0.0, frequency=0.0, repetition=1.0):
    """Greedy ids of the plain definition."""
    ids = list(prompt)
    for _ in range(count):
        logits = np.array(logits_of(ids), np.float64)
        for token in set(ids):
            value = logits[token]
            logits[token] = value / repetition if value > 0 else value * repetition
        for token in set(ids[len(prompt) :]):
            times = ids[len(prompt) :].count(token)
            logits[token] -= presence + frequency * times
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :]


PENALTIES = [
    {"presence": 2.0},
    {"frequency": 2.0},
    {"repetition": 1.8},
    {"presence": -2.0},
    {"presence": 1.0, "frequency": 0.7, "repetition": 1.3},
]


def test_penalties_look_at_the_right_tokens_alone_mixed_forked_and_preempted(smol):
    import torch
    from transformers import AutoModelForCausalLM

    from cotrt.models import starter

    model = AutoModelForCausalLM.from_pretrained(starter.ensure(), dtype=torch.float32).eval()

    def logits_of(ids):
        with torch.no_grad():
            return model(torch.tensor([ids])).logits[0, -1].numpy()

    # " the cat" three times: the likely next id is in the prompt already.
    prompt = smol.tokenizer.encode("the cat sat on the cat and the cat saw the")
    params, wanted = [], []
    for penalty in PENALTIES:
        names = {f"{name}_penalty": value for name, value in penalty.items()}
        params.append(SamplingParams(temperature=0, max_tokens=6, **names))
        wanted.append(numpy_model(logits_of, prompt, 6, **penalty))
    alone = [smol.generate(prompt, p)[0].outputs[0].token_ids for p in params]
    assert alone == wanted
    mixed = smol.generate([prompt] * len(params), params)
    assert [r.outputs[0].token_ids for r in mixed] == wanted
    # A fork goes on with its own history.
    for one, ids in zip(params, wanted):
        branch = smol.branch(prompt)
        first = branch.generate(one.replace(max_tokens=3)).result().token_ids
        child = branch.fork()[0]
        rest = child.generate(one.replace(max_tokens=3)).result().token_ids
        assert first + rest == ids


def test_penalties_after_preemption_equal_those_alone():
    params = SamplingParams(
        max_tokens=60, seed=5, presence_penalty=0.6, frequency_penalty=0.4, repetition_penalty=1.2
    )
    with scripted() as llm, scripted(kv_cache_memory_bytes=16 * 4 * 8) as small:
        prompts = [string.ascii_lowercase[i:] + "abcdefghijklmn" for i in range(6)]
        wanted = [llm.generate(p, params)[0].outputs[0].token_ids for p in prompts]
        found = [r.outputs[0].token_ids for r in small.generate(prompts, params)]
        assert found == wanted and small.metrics["preemptions"] > 0


# ---- logprobs and ranges ------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 5])
def test_logprobs_have_their_shape_and_their_texts_join_to_the_text(smol, count):
    prompt = "Line 1\nLine 2\n\n3."
    params = SamplingParams(max_tokens=5, seed=1, logprobs=count, prompt_logprobs=count)
    result = smol.generate(prompt, params)[0]
    output = result.outputs[0]
    entries = result.prompt_logprobs
    assert entries[0] is None and len(entries) == len(result.prompt_token_ids)
    joined = smol.tokenizer.token_text(result.prompt_token_ids[0])
    for token, entry in zip(result.prompt_token_ids[1:], entries[1:]):
        joined += entry[token].decoded_token
        assert len(entry) in {max(count, 1), count + 1} and next(iter(entry)) == token
    assert joined == prompt
    assert len(output.logprobs) == len(output.token_ids) == 5
    texts = [e[t].decoded_token for e, t in zip(output.logprobs, output.token_ids)]
    assert "".join(texts) == output.text
    assert output.cumulative_logprob == pytest.approx(
        sum(e[t].logprob for e, t in zip(output.logprobs, output.token_ids)), abs=1e-4
    )
    none = smol.generate(prompt, params.replace(max_tokens=0))[0]
    assert none.outputs[0].logprobs == [] and len(none.prompt_logprobs) == len(entries)
    again = smol.generate(prompt, params)[0]
    for one, other in zip(entries[1:], again.prompt_logprobs[1:]):
        assert {t: e.logprob for t, e in one.items()} == pytest.approx(
            {t: e.logprob for t, e in other.items()}, abs=1e-4
        )


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", v) for v in (NAN, INF, "0.5", True, -0.1, 101)],
        *[("top_p", v) for v in (NAN, 0, 1.1, -1)],
        *[("min_p", v) for v in (NAN, -0.1, 1.1)],
        *[("presence_penalty", v) for v in (NAN, 9)],
        *[("frequency_penalty", v) for v in (NAN, -9)],
        *[("repetition_penalty", v) for v in (NAN, 0, 11)],
        *[("n", v) for v in (0, -1, 1.5, 10**6, True)],
        *[("max_tokens", v) for v in (-1, 10**12, "5", 1.0)],
        *[("logprobs", v) for v in (-1, 21, 10**6)],
        *[("prompt_logprobs", v) for v in (-1, 21)],
        *[("top_k", v) for v in (-2, 1.5)],
        *[("seed", v) for v in (2**70, -(2**63) - 1, 1.5)],
        *[("stop", v) for v in ("", ["a", ""], [1], ["a"] * 65)],
        *[("logit_bias", v) for v in ({1: NAN}, {1: 101}, {-1: 1})],
        ("no_such_field", 1),
    ],
)
def test_values_out_of_range_are_refused_and_named(field, value):
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})
    with scripted(letters) as llm, pytest.raises(ValueError, match=field):
        llm.branch("a").generate(**{field: value})
