"""Many questions, one file: written at once, resumed, never half."""

from __future__ import annotations

import functools
import json

import anyio
import pytest
from search_helpers import run, small_llm, text_model

from cotrt import InvalidRequestError, SamplingParams, search
from cotrt.search import SearchResult, run_many

PARAMS = SamplingParams(max_tokens=20, seed=1)
QUESTIONS = ["one?", "two?", {"text": "three?"}, "one?"]


def asker(llm, asked: list):
    async def ask(question) -> SearchResult:
        asked.append(question)
        text = question if isinstance(question, str) else question["text"]
        return await search.best_of_n(llm, text, n=2, params=PARAMS)

    return ask


@pytest.mark.parametrize("concurrency", [1, 3])
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_run_is_resumed(tmp_path, backend: str, concurrency: int) -> None:
    out, asked = tmp_path / "out.jsonl", []
    many = functools.partial(run, run_many, backend=backend, concurrency=concurrency, out=out)
    with small_llm(text_model({"a": 1.0, "b": 1.0})) as llm:
        results = many(asker(llm, asked), QUESTIONS)
        assert len(asked) == 4 and [r.tree.root.text for r in results] == [
            "one?",
            "two?",
            "three?",
            "one?",
        ]
        lines = out.read_text().splitlines()
        assert sorted(json.loads(line)["repeat"] for line in lines) == [0, 0, 0, 1]
        assert many(asker(llm, asked), QUESTIONS) == results and len(asked) == 4
        # A crash in the middle of a line: that question alone is asked again.
        kept = lines[:2]
        out.write_text("\n".join(kept) + "\n" + lines[2][:25])
        again = many(asker(llm, asked), QUESTIONS)
        assert len(asked) == 6 and len(out.read_text().splitlines()) == 4
        assert [r.answer for r in again] == [r.answer for r in results]
        more = many(asker(llm, asked), [*QUESTIONS, "four?"])
        assert len(asked) == 7 and len(more) == 5
        assert llm.memory().in_use == 0


def test_an_error_keeps_what_is_done(tmp_path) -> None:
    out = tmp_path / "out.jsonl"
    with small_llm(text_model({"a": 1.0})) as llm:

        async def ask(question: str) -> SearchResult:
            if question == "three?":
                raise KeyError(question)
            return await search.best_of_n(llm, question, n=1, params=PARAMS)

        with pytest.raises(KeyError, match="three"):
            run(run_many, ask, ["one?", "two?", "three?", "four?"], out=out)
        assert len(out.read_text().splitlines()) == 2


def test_a_cancelled_question_is_not_written(tmp_path) -> None:
    out = tmp_path / "out.jsonl"

    async def main(llm) -> None:
        with anyio.move_on_after(0.2):
            await run_many(
                lambda q: search.best_of_n(llm, q, n=2, params=SamplingParams(max_tokens=10**6)),
                ["one?"],
                out=out,
            )

    from search_helpers import counting_model

    with small_llm(counting_model()) as llm:
        run(main, llm)
        assert out.read_text() == "" and llm.memory().in_use == 0


def test_other_files_and_questions_are_refused(tmp_path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text('{"some": "other file"}\n')
    with pytest.raises(InvalidRequestError, match="line 1 of out.jsonl"):
        run(run_many, None, ["one?"], out=out)
    assert out.read_text() == '{"some": "other file"}\n'
    with pytest.raises(InvalidRequestError, match="question 1"):
        run(run_many, None, ["one?", {1, 2}], out=tmp_path / "new.jsonl")


def test_a_bar_is_shown_where_it_is_wanted(tmp_path, capsys) -> None:
    with small_llm(text_model({"a": 1.0})) as llm:
        run(run_many, asker(llm, []), ["one?", "two?"], out=tmp_path / "o", progress=True)
        shown = capsys.readouterr()
        assert "2/2" in shown.err and "tokens/s" in shown.err and "reused" in shown.err
        assert not shown.out
        run(run_many, asker(llm, []), ["one?"], out=tmp_path / "p", progress=False)
        assert capsys.readouterr().err == ""
