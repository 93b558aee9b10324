"""Reuse and seeds on the starter model in float32, with real attention over shared KV."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from api_helpers import COLON, END, make_rig
from isolation import shared_fixture

from cotrt import LLM, RequestOutput, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=5)
TEXT = (
    "The lighthouse keeper counted the ships each evening, wrote their names into a thick green "
    "book, and told nobody that one of them, the oldest, had not been seen for forty years."
)


@shared_fixture()
def cold() -> Iterator[LLM]:
    """The starter model without a prefix cache."""
    with LLM(
        "smollm2-135m",
        dtype="float32",
        kv_cache_memory_bytes=1 << 26,
        enable_prefix_caching=False,
    ) as llm:
        yield llm


@pytest.fixture
def ids(smol: LLM) -> list[int]:
    found: list[int] = smol.tokenizer.encode(TEXT * 2)
    assert len(found) > 60
    return found


def assert_same(out: RequestOutput, expected: RequestOutput) -> None:
    one, other = out.outputs[0], expected.outputs[0]
    assert one.token_ids == other.token_ids
    assert one.logprobs is not None and other.logprobs is not None
    for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
        for token in mine.keys() & theirs.keys():
            assert mine[token].logprob == pytest.approx(theirs[token].logprob, abs=1e-4)


def test_fully_cached_prompts_answer_as_a_cold_engine_does(
    smol: LLM, cold: LLM, ids: list[int]
) -> None:
    lengths = [15, 16, 17, 32, 48]
    prompts = [[1000 + n, *ids[: n - 1]] for n in lengths]
    expected = cold.generate(prompts, GREEDY)
    for copies in (1, 1, 2):
        outs = smol.generate([p for p in prompts for _ in range(copies)], GREEDY)
        for number, out in enumerate(outs):
            assert_same(out, expected[number // copies])
            assert out.num_cached_tokens < lengths[number // copies]
    longer = [[*prompt, *ids[50:57]] for prompt in prompts]
    outs, expected = smol.generate(longer, GREEDY), cold.generate(longer, GREEDY)
    for out, other, length in zip(outs, expected, lengths, strict=True):
        assert_same(out, other)
        assert out.num_cached_tokens >= length // 16 * 16


@pytest.mark.parametrize("count", [6, 22])
def test_a_follow_up_of_a_session_answers_as_a_cold_engine_does(
    smol: LLM, cold: LLM, ids: list[int], count: int
) -> None:
    prompt = [2000 + count, *ids[:9]]
    first = smol.generate(prompt, GREEDY.replace(max_tokens=count))[0].outputs[0].token_ids
    history = [*prompt, *first]
    assert len(history) % 16 == 0
    follow = [*history, *ids[20:25]]
    out = smol.generate(follow, GREEDY)[0]
    assert_same(out, cold.generate(follow, GREEDY)[0])
    assert len(history) - 1 - 16 < out.num_cached_tokens <= len(history) - 1


def test_a_seeded_request_is_the_same_alone_and_with_mates(smol: LLM, ids: list[int]) -> None:
    seeded = SamplingParams(seed=42, max_tokens=8, ignore_eos=True)
    free = seeded.replace(seed=None)
    prompt, mates = ids[:20], [ids[n : n + 20] for n in range(1, 8)]

    def run(batch: list[list[int]], at: int, *, cached: bool = True) -> list[int]:
        params = [seeded if number == at else free for number in range(len(batch))]
        out = smol.generate(batch, params)[at]
        assert out.num_cached_tokens > 0 or not cached
        return out.outputs[0].token_ids

    alone = run([prompt], 0, cached=False)
    assert run([prompt], 0) == alone  # through a prefix hit
    assert run([prompt, mates[0]], 0) == alone
    assert run([*mates[:4], prompt, *mates[4:]], 4) == alone


def test_n_outputs_of_a_seed_differ_and_repeat_and_unseeded_ones_differ(
    smol: LLM, ids: list[int]
) -> None:
    params = SamplingParams(seed=42, n=4, max_tokens=8, ignore_eos=True)
    first, again = (
        [tuple(o.token_ids) for o in smol.generate(ids[:20], params)[0].outputs] for _ in range(2)
    )
    assert first == again
    assert len(set(first)) >= 3
    free = SamplingParams(max_tokens=8, ignore_eos=True)
    one_by_one = {tuple(smol.generate(ids[:20], free)[0].outputs[0].token_ids) for _ in range(6)}
    together = {tuple(o.outputs[0].token_ids) for o in smol.generate([ids[:20]] * 6, free)}
    assert len(one_by_one) >= 4 and len(together) >= 4


def test_fork_then_decode_is_decode_from_scratch(smol: LLM, cold: LLM, ids: list[int]) -> None:
    with smol.branch([3000, *ids[:40]]) as root:
        before = smol.metrics["prompt_tokens_computed"]
        branches = root.fork(4)
        for number, branch in enumerate(branches):
            branch.extend(ids[number : number + 7])
        branches.generate(temperature=0.0, max_tokens=5, ignore_eos=True).result()
        assert smol.metrics["prompt_tokens_computed"] == before + 41 + 4 * 7
        expected = cold.generate(
            [[3000, *ids[:40], *ids[n : n + 7]] for n in range(4)], GREEDY.replace(max_tokens=5)
        )
        for branch, out in zip(branches, expected, strict=True):
            assert branch.token_ids[-5:] == out.outputs[0].token_ids
            assert out.outputs[0].logprobs is not None
            scratch = [
                entry[t].logprob
                for entry, t in zip(out.outputs[0].logprobs, out.outputs[0].token_ids, strict=True)
            ]
            assert branch.logprobs[-5:] == pytest.approx(scratch, abs=1e-3)


PREFIX = [1702, 86, 1088]  # as text they would be one other id, 12821


@pytest.fixture(scope="module")
def prefix_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A rig that says `PREFIX` after a colon, and after the template's "assistant" line, and ends.

    There its last text is a newline, the id 198.
    """
    probs = {198: {PREFIX[0]: 1.0}}
    folder = tmp_path_factory.mktemp("prefix")
    return make_rig(folder, [COLON, *PREFIX, END], probs=probs)


def test_a_session_keeps_ids_that_its_text_would_not_be_encoded_to(prefix_folder: Path) -> None:
    pref, f, ix = PREFIX
    with LLM(prefix_folder, dtype="float32", kv_cache_memory_bytes=1 << 24) as llm:
        branch = llm.branch("go:")
        start = len(branch)
        branch.generate(temperature=0.0, max_tokens=3).result()
        assert branch.token_ids[start:] == [pref, f, ix]
        assert branch.decode(start) == "prefix"
        assert llm.tokenizer.encode("prefix") == [12821]
        branch.extend(" and more")
        before = llm.metrics["prompt_tokens_computed"]
        branch.generate(temperature=0.0, max_tokens=1).result()
        assert branch.token_ids[start : start + 3] == [pref, f, ix]
        # Of the history only the last sampled token was not computed, and it is no given one.
        assert llm.metrics["prompt_tokens_computed"] == before + len(branch) - 1 - start - 3
        assert llm.metrics["recomputed_tokens"] == 0


def test_a_chat_keeps_ids_that_its_text_would_not_be_encoded_to(prefix_folder: Path) -> None:
    with LLM(prefix_folder, dtype="float32", kv_cache_memory_bytes=1 << 24) as llm:
        chat, ends = llm.start_chat(), []
        for turn in range(3):
            before, length = llm.metrics["prompt_tokens_computed"], len(chat.branch)
            output = chat.send(f"Turn {turn}", temperature=0.0, max_tokens=9).result()
            assert (output.token_ids, output.text) == ([*PREFIX, END], "prefix")
            ends.append(len(chat.branch))
            for end in ends:  # those of all turns before are as they were sampled
                assert chat.branch.token_ids[end - 4 : end] == [*PREFIX, END]
            new = len(chat.branch) - length - len(output.token_ids)
            assert llm.metrics["prompt_tokens_computed"] - before == new
        encoded = llm.tokenizer.encode_chat(chat.messages, add_generation_prompt=False)
        assert encoded.count(12821) == 3 and PREFIX[0] not in encoded
        assert llm.metrics["recomputed_tokens"] == 0
