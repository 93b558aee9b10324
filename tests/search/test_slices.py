"""A generate in slices is the same as one generate: draws, stops, characters, limits."""

from __future__ import annotations

import pytest
from search_helpers import EOS, PROMPT, counting_model, run, small_llm, text_model

from cotrt import LLM, SamplingParams, search
from cotrt.models.tokenizer import Tokenizer
from cotrt.search import Budget
from cotrt.search.node_text import ends_inside_stop, find_stop, token_texts
from cotrt.search.session import Session
from cotrt.testing import ScriptedModel


async def grow_in_slices(llm, every: int | None, params: SamplingParams, n: int = 3, **more):
    session = Session("test", llm, PROMPT, params=params, budget=None, on_event=None)
    async with session:
        growths = session.begin(session.fork(session.root, n), **more)
        while not all(growth.done for growth in growths):
            await session.advance(growths, every)
    return await session.finish()


@pytest.mark.parametrize("every", [1, 2, 3, 7])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=25),
        SamplingParams(max_tokens=25, frequency_penalty=0.7, min_tokens=9),
        SamplingParams(max_tokens=25, stop=["xy", "abc", "q"]),
        SamplingParams(max_tokens=40, stop=["abcab", "mno"], min_tokens=6, seed=3),
    ],
)
def test_slices_change_nothing(every: int, params: SamplingParams) -> None:
    texts = {"abcabcabcaabxxyq": 2.0, "aabxyzabcab": 1.0, "mmnoabcabq": 1.0, "xxxxy": 1.0}
    for make in (counting_model, lambda: text_model(texts)):
        with small_llm(make()) as llm:
            whole = run(grow_in_slices, llm, None, params)
        with small_llm(make()) as llm:
            sliced = run(grow_in_slices, llm, every, params)
        assert [n.token_ids for n in sliced.tree.nodes] == [n.token_ids for n in whole.tree.nodes]
        assert [(n.finish_reason, n.stop_reason, n.state) for n in sliced.tree.nodes] == [
            (n.finish_reason, n.stop_reason, n.state) for n in whole.tree.nodes
        ]


def test_a_delimiter_between_two_slices_ends_the_step() -> None:
    with small_llm(text_model({"one\n\ntwo": 1.0})) as llm:
        # 4 tokens end between the two newlines: the budget's odd shares make such slices.
        result = run(
            search.step_beam_search,
            llm,
            PROMPT,
            width=1,
            branching=1,
            params=SamplingParams(max_tokens=20),
            budget=Budget(max_tokens=4),
        )
        assert result.best.text == "one\n"
        result = run(grow_in_slices, llm, 4, SamplingParams(max_tokens=20), 1, delimiter="\n\n")
        assert result.tree.nodes[1].text == "one\n\n"
        assert result.tree.nodes[1].stop_reason == "\n\n"


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("every", [1, 2, 3, 4])
def test_a_stop_string_across_nodes_cuts_the_texts_of_all(every: int, include: bool) -> None:
    """A growth may move on from node to node; their texts, joined, are those of one generate."""

    async def grow(llm, params):
        session = Session("test", llm, PROMPT, params=params, budget=None, on_event=None)
        async with session:
            growths = session.begin(session.fork(session.root, 1))
            await session.advance(growths, every)
            while not growths[0].done:
                growths[0].node = session.follow(growths[0].node)
                await session.advance(growths, every)
            return growths[0].node.path_text, len(session.tree.nodes)

    params = SamplingParams(max_tokens=20, stop=["the end"], include_stop_str_in_output=include)
    with small_llm(text_model({"so, the end. no": 1.0})) as llm:
        text, count = run(grow, llm, params)
        assert text == llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0].text
        assert text == ("so, the end" if include else "so, ") and count >= 3


class ByteTokenizer:
    """Token i is byte i."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")


def byte_model(text: str) -> ScriptedModel:
    body = text.encode()

    def next_probs(ids: list[int]) -> dict[int, float]:
        written = len(ids) - len(PROMPT)
        return {body[written] if written < len(body) else EOS: 1.0}

    return ScriptedModel(next_probs, vocab_size=256, eos_token_id=EOS, tokenizer=ByteTokenizer())


@pytest.mark.parametrize("every", [1, 2, 3, 5, None])
def test_texts_of_nodes_join_to_the_whole_text(every: int | None) -> None:
    text = "日本 🦊 é\n\nعربى ✓"
    with LLM(byte_model(text), kv_cache_memory_bytes=2**16) as llm:
        result = run(
            search.step_beam_search,
            llm,
            PROMPT,
            width=1,
            branching=1,
            params=SamplingParams(max_tokens=every or 100),
            max_steps=100,
        )
        assert result.best.text == text and result.best.finished
        for node in result.tree.nodes:
            assert "�" not in node.text
            assert "".join(node.token_texts).startswith(node.text)


def test_token_texts_hold_back_incomplete_characters() -> None:
    tokenizer = Tokenizer.from_object(ByteTokenizer())
    fox = list("🦊".encode())
    assert token_texts(tokenizer, [97, *fox, 98]) == ["a", "", "", "", "🦊", "b"]
    assert token_texts(tokenizer, fox[:3]) == ["", "", ""]
    assert token_texts(tokenizer, fox[3:], fox[:3]) == ["🦊"]
    assert token_texts(tokenizer, [255, 97])[-1].endswith("a")
    assert token_texts(None, [1, 2]) == ["", ""]


def test_stops_across_slices() -> None:
    assert ends_inside_stop("abc\n", ["\n\n"]) and ends_inside_stop("x�", ["y"])
    assert not ends_inside_stop("abc", ["\n\n"]) and not ends_inside_stop("", ["ab"])
    assert find_stop("one\n\n", 1, ["\n\n", "zz"]) == "\n\n"
    assert find_stop("\n\nab", 1, ["\n\n"]) is None
    assert find_stop("abab", 2, ["bab", "ab"]) == "ab" or find_stop("abab", 1, ["bab"]) == "bab"


def test_the_contexts_end_is_a_length_and_no_error() -> None:
    with small_llm(counting_model(length=40)) as llm:
        result = run(
            search.step_beam_search,
            llm,
            PROMPT,
            width=2,
            branching=2,
            params=SamplingParams(max_tokens=12),
        )
        assert len(result.best.token_ids) == 30 and not result.best.finished
        assert result.best.finish_reason == "length"
        assert llm.memory().in_use == 0
