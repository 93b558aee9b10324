"""Texts are made in one way: whatever shows generated tokens shows what a generate shows."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from api_helpers import scripted
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokens import byte_tokenizer, piece_tokenizer

import cotrt
from cotrt import LLM, BeamSearchParams, SamplingParams, search
from cotrt.models.tokenizer import Tokenizer
from cotrt.sampling.detokenizer import Detokenizer, text_after

NUM_CASES = int(os.environ.get("COTRT_RANDOM_CASES", "200"))
KINDS = ["metaspace", "legacy", "bytes", "tags"]


def make_tokenizer(kind: str, folder: Path) -> Path:
    """A SentencePiece-like one of either style, a byte-level one, and one with a special tag."""
    if kind == "bytes":
        return byte_tokenizer(folder / kind, eos_token="<|end|>")
    if kind == "tags":
        added = {"258": {"content": "<think>", "special": True}}
        return byte_tokenizer(folder / kind, eos_token="<|end|>", added_tokens_decoder=added)
    return piece_tokenizer(folder / kind, style=kind)


@pytest.fixture(params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return make_tokenizer(request.param, tmp_path)


Says = Callable[[Sequence[int]], LLM]


@pytest.fixture
def says(folder: Path) -> Says:
    """An LLM that says these ids after ``he``, and then the last of them for ever."""
    reader = Tokenizer.from_folder(folder)
    assert reader is not None
    start = len(reader.encode("he"))

    def make(ids: Sequence[int], eos: int | None = None) -> LLM:
        def probs(path: list[int]) -> dict[int, float]:
            return {ids[min(len(path) - start, len(ids) - 1)]: 1.0}

        eos = reader.eos_token_id if eos is None else eos
        size = reader.vocab_size
        return scripted(probs, vocab_size=size, eos_token_id=eos, tokenizer=str(folder))

    return make


def faces(llm: LLM, params: SamplingParams, delimiter: str | None = " ") -> dict[str, str]:
    """The generated text after ``he``, as each face shows it; a delimiter of None: no steps."""
    found = {"generate": llm.generate(["he"], params, use_tqdm=False)[0].outputs[0].text}
    found["stream"] = "".join(chunk.text for chunk in llm.branch("he").generate(params))
    best = cotrt.run(search.best_of_n, llm.branch("he"), n=2, params=params).best
    found["search"] = best.text
    if delimiter is not None:
        steps = cotrt.run(
            search.step_beam_search,
            llm.branch("he"),
            width=1,
            branching=1,
            delimiter=delimiter,
            max_steps=50,
            params=params,
        )
        found["steps"] = steps.best.text
    agent = cotrt.run(search.run_agent, llm.branch("he"), [len], params=params)
    found["agent"] = agent.best.text
    if not params.stop:
        limit = params.max_tokens or 16
        beams = llm.beam_search(["he"], BeamSearchParams(beam_width=1, max_tokens=limit))
        found["beam"] = beams[0].sequences[0].text
    return found


def test_every_face_keeps_the_spaces(says: Says, folder: Path) -> None:
    reader = Tokenizer.from_folder(folder)
    text = " he w🦊 he"
    ids = [*reader.encode_continuation(text), reader.eos_token_id]
    with says(ids) as llm:
        shown = faces(llm, SamplingParams(temperature=0.0, max_tokens=60))
        assert set(shown.values()) == {text}, shown
        branch = llm.branch("he")
        start = len(branch)
        branch.generate(temperature=0.0, max_tokens=60).result()
        assert branch.decode(start, len(branch) - 1) == text
        assert branch.decode(start, skip_special_tokens=True) == text
        assert branch.text.endswith("he" + text + reader.decode([reader.eos_token_id]))


def test_an_end_that_is_no_special_token_is_shown_by_no_face(says: Says, folder: Path) -> None:
    reader = Tokenizer.from_folder(folder)
    said, end = reader.encode_continuation(" he w"), reader.encode_continuation("a")[-1]
    with says([*said, end], eos=end) as llm:
        shown = faces(llm, SamplingParams(temperature=0.0, max_tokens=60))
        assert set(shown.values()) == {" he w"}, shown


def test_special_tokens_inside_are_left_out_by_every_face(says: Says, folder: Path) -> None:
    reader = Tokenizer.from_folder(folder)
    special = min(reader.all_special_ids - {reader.eos_token_id})
    said = reader.encode_continuation(" he")
    ids = [special, *said, special, special, *said, reader.eos_token_id]
    for stop in (None, "zz"):  # a stop string that does not come changes no text
        params = SamplingParams(temperature=0.0, max_tokens=60, stop=stop)
        with says(ids) as llm:
            shown = faces(llm, params)
            assert set(shown.values()) == {" he he"}, shown


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_cuts_the_text_of_every_face(says: Says, folder: Path, include: bool) -> None:
    reader = Tokenizer.from_folder(folder)
    ids = [*reader.encode_continuation(" he wll he"), reader.eos_token_id]
    params = SamplingParams(
        temperature=0.0, max_tokens=60, stop=[" wl"], include_stop_str_in_output=include
    )
    with says(ids) as llm:
        shown = faces(llm, params, "e")
        assert set(shown.values()) == {" he wl" if include else " he"}, shown


@pytest.mark.parametrize("text", [" he", " he日", " é🦊"])
def test_a_text_cut_inside_a_character_ends_alike(says: Says, folder: Path, text: str) -> None:
    """Also where its bytes follow those of whole characters."""
    reader = Tokenizer.from_folder(folder)
    ids = reader.encode_continuation(text + "🦊")
    with says(ids) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=len(ids) - 2)
        shown = faces(llm, params, None)  # which cut a limit of one step, and not of all
        assert len(set(shown.values())) == 1 and shown["generate"].startswith(text + "\ufffd"), (
            shown
        )


@pytest.mark.parametrize("kind", KINDS)
@settings(
    max_examples=NUM_CASES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_texts_of_parts_join_to_the_whole(
    kind: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    reader = _opened(kind, tmp_path_factory)
    pieces = [" he", "he", "w", " ", "  ", "🦊", "é", "[", "ll he"]
    texts = data.draw(st.lists(st.sampled_from(pieces), min_size=1, max_size=60))
    parts = [reader.encode_continuation(text) for text in texts]
    ids = reader.encode("he") + [token for part in parts for token in part]
    skips = data.draw(st.booleans())
    cuts = sorted(data.draw(st.lists(st.integers(0, len(parts)), max_size=5)))
    ends = [len(reader.encode("he")) + sum(map(len, parts[:cut])) for cut in cuts]
    bounds = [len(reader.encode("he")), *ends, len(ids)]
    shown = [
        text_after(reader, ids[low:high], ids[:low], skip_special_tokens=skips)
        for low, high in itertools.pairwise(bounds)
    ]
    assert "".join(shown) == "".join(texts)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=NUM_CASES, deadline=None)
@given(data=st.data())
def test_texts_are_the_same_in_pieces_of_any_size(
    kind: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """For any ids at all, with parts of characters and damage among them."""
    reader = _opened(kind, tmp_path_factory)
    some = [reader.encode_continuation(text) for text in (" he", "🦊", "日", "é", " ", "\ufffd")]
    tokens = st.integers(0, reader.vocab_size + 1).map(lambda i: [i])
    parts = data.draw(st.lists(st.sampled_from(some) | tokens, max_size=40))
    ids = [token for part in parts for token in part]
    start = data.draw(st.integers(0, len(ids)))
    skips = data.draw(st.booleans())
    whole = text_after(reader, ids[start:], ids[:start], skip_special_tokens=skips)
    made = Detokenizer(reader, skip_special_tokens=skips, context_ids=ids[:start])
    pieces = []
    while start < len(ids):
        size = data.draw(st.integers(1, 9))
        pieces.append(made.append(ids[start : start + size]))
        start += size
    assert "".join(pieces) + made.flush() == whole


_kept: dict[str, Tokenizer] = {}


def _opened(kind: str, folders: pytest.TempPathFactory) -> Tokenizer:
    if kind not in _kept:
        found = Tokenizer.from_folder(make_tokenizer(kind, folders.mktemp(kind)))
        assert found is not None
        _kept[kind] = found
    return _kept[kind]


@pytest.mark.parametrize("kind", ["metaspace", "legacy"])
def test_a_stop_string_that_does_not_come_changes_no_text(kind: str, tmp_path: Path) -> None:
    """After BOS alone the dummy space is no text, with stop strings as without."""
    folder = make_tokenizer(kind, tmp_path)
    reader = Tokenizer.from_folder(folder)
    assert reader is not None
    said = [*reader.encode_continuation(" he w"), 2]

    def probs(path: list[int]) -> dict[int, float]:
        return {said[min(len(path) - 1, len(said) - 1)]: 1.0}

    size = reader.vocab_size
    with scripted(probs, vocab_size=size, eos_token_id=2, tokenizer=str(folder)) as llm:
        for stop in (None, "zz"):
            out = llm.generate([""], SamplingParams(temperature=0.0, stop=stop), use_tqdm=False)
            assert out[0].outputs[0].text == "he w"
