"""Many questions, one line of JSON each; run it again and it goes on where it stopped."""

from __future__ import annotations

import tempfile
from pathlib import Path

import cotrt
from cotrt import LLM, SamplingParams, search

QUESTIONS = [f"Question: what is {a} + {a + 1}?\nAnswer:" for a in range(2, 8)]


def main() -> None:
    with LLM("smollm2-135m", seed=7) as llm, tempfile.TemporaryDirectory() as folder:

        async def ask(question: str) -> search.SearchResult:
            return await search.self_consistency(
                llm,
                question,
                n=8,
                params=SamplingParams(temperature=0.7, max_tokens=12, stop="\n", seed=1),
            )

        out = Path(folder) / "answers.jsonl"
        cotrt.run(search.run_many, ask, QUESTIONS[:3], out=out)
        results = cotrt.run(search.run_many, ask, QUESTIONS, out=out, concurrency=2)
        for question, result in zip(QUESTIONS, results, strict=True):
            print(question.splitlines()[0], result.answer, f"({result.stopped_by})")
        print(
            f"{len(out.read_text().splitlines())} lines, {llm.metrics['generated_tokens']} tokens"
        )


if __name__ == "__main__":
    main()
