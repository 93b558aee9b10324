"""Text as it streams: characters and stop strings that span tokens."""

from __future__ import annotations

import asyncio

import pytest
from api_helpers import EOS, Gate, saying, scripted
from tokens import byte_tokenizer

SPOKEN = "Grüße, 日本 🦊! Ärger"


@pytest.fixture
def spell(tmp_path):
    """Makes an LLM whose tokens are bytes, and that says a text after the prompt ``>``."""
    folder = byte_tokenizer(tmp_path / "bytes", eos_token="<|end|>")
    opened = []

    def make(text: str, gate: Gate | None = None):
        from pathlib import Path

        from cotrt.models.tokenizer import Tokenizer

        ids = [*Tokenizer.from_folder(Path(folder)).encode(text), 257]

        def probs(path):
            return {ids[min(max(len(path) - 1, 0), len(ids) - 1)]: 1.0}

        if gate is not None:
            gate.probs = probs
        llm = scripted(gate or probs, vocab_size=300, eos_token_id=257, tokenizer=str(folder))
        opened.append(llm)
        return llm

    yield make
    for llm in opened:
        llm.close()


def one_by_one(gate: Gate, generation):
    """Chunks, each made of one token: the gate opens for one step at a time."""
    chunks = []
    iterator = iter(generation)
    while True:
        gate.open.set()
        try:
            chunks.append(next(iterator))
        except StopIteration:
            return chunks


def test_no_chunk_ever_shows_half_a_character(spell):
    llm = spell(SPOKEN)
    generation = llm.branch(">").generate()
    chunks = list(generation)
    assert "".join(c.text for c in chunks) == SPOKEN == generation.result().text
    assert all("�" not in c.text for c in chunks)
    assert sum(len(c.token_ids) for c in chunks) == len(SPOKEN.encode()) + 1

    async def read():
        return [chunk.text async for chunk in llm.branch(">").generate()]

    texts = asyncio.run(read())
    assert "".join(texts) == SPOKEN and all("�" not in text for text in texts)


def test_a_character_cut_by_length_ends_as_a_replacement_character(spell):
    llm = spell("a🦊b")
    branch = llm.branch(">")
    generation = branch.generate(max_tokens=3)
    assert "".join(c.text for c in generation) == generation.result().text == "a�"
    rest = branch.generate().result()  # goes on inside the character
    assert rest.text.endswith("b") and branch.text == ">a🦊b<|end|>"


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_across_tokens_is_held_back_and_cut(spell, include):
    gate = Gate()
    llm = spell("one two, 日本 three", gate)
    branch = llm.branch(">")
    generation = branch.generate(stop=["本 t", "zzz"], include_stop_str_in_output=include)
    chunks = one_by_one(gate, generation)
    expected = "one two, 日本 t" if include else "one two, 日"
    assert "".join(c.text for c in chunks) == generation.result().text == expected
    output = generation.result()
    assert (output.finish_reason, output.stop_reason) == ("stop", "本 t")
    # The branch holds what the model saw, and so do the ids.
    assert branch.text == ">one two, 日本 t" and len(output.token_ids) == len(branch) - 1
    assert len(output.token_ids) == len("one two, 日本 t".encode())


def test_what_only_looks_like_a_stop_string_comes_out_in_time(spell):
    llm = spell("ab ab abc")
    generation = llm.branch(">").generate(stop="abcd")
    assert "".join(c.text for c in generation) == "ab ab abc"
    assert generation.result().finish_reason == "stop" and generation.result().stop_reason is None


def test_the_stop_string_that_ends_first_wins_and_the_prompt_does_not_count():
    with scripted(saying("hello world", 3)) as llm:
        output = llm.branch("lo ").generate(stop=["world", "lo", "o w"]).result()
        assert (output.text, output.stop_reason) == ("hel", "lo")
        # "he" is in the prompt's end and the output's begin: stops look at the output alone.
        output = llm.branch("xyh").generate(stop="hh").result()
        assert output.text == "hello world"


def test_min_tokens_lets_no_stop_count_before():
    with scripted(saying("aXbXcX", 1)) as llm:
        output = llm.branch(">").generate(stop="X", min_tokens=3).result()
        assert output.text == "aXb" and len(output.token_ids) == 4
        output = llm.branch(">").generate(stop_token_ids=[ord("X")], min_tokens=2).result()
        assert (output.text, output.stop_reason) == ("aXb", ord("X"))


def test_decode_of_parts_and_text_agree(spell):
    llm = spell(SPOKEN)
    branch = llm.branch(">")
    branch.generate().result()
    assert branch.text == ">" + SPOKEN + "<|end|>"
    assert branch.decode(1, skip_special_tokens=True) == SPOKEN
    assert branch.decode(-1) == "<|end|>" and branch.decode(0, 1) == ">"
    assert branch.finished
    branch.extend("<|end|>").extend("<|end|>", special=False)
    assert branch.token_ids[-8:-7] == [257] and branch.text.endswith("<|end|><|end|>")
    assert not branch.finished


def test_branches_finished_are_those_that_ended_by_eos():
    def probs(ids):
        return {EOS: 1.0} if ids[0] == ord("e") else {ord("a"): 1.0}

    with scripted(probs) as llm:
        from cotrt import Branches

        branches = Branches([llm.branch("e"), llm.branch("x"), llm.branch("e")])
        assert len(branches.finished) == 0
        branches.generate(max_tokens=3).result()
        assert [b.id for b in branches.finished] == [branches[0].id, branches[2].id]
        assert isinstance(branches[1:], Branches) and len(branches[1:].finished) == 1
