"""Self-refine: a test criticises every attempt, and the retry goes on before the mistake."""

from __future__ import annotations

import re

import cotrt
from cotrt import LLM, SamplingParams, search

PROMPT = "The squares of the first ten numbers, in order: 1, 4,"


def criticise(node: search.Node) -> search.Critique | None:
    """Keep the tokens before the first number that is wrong; nothing is wrong with eight right."""
    numbers = re.finditer(r"\d+", node.path_text)
    wanted = [9, 16, 25, 36, 49, 64, 81, 100]
    wrong = next((n for n, square in zip(numbers, wanted) if int(n.group()) != square), None)
    if wrong is None:
        return None
    before = len(node.path_text) - len(node.text)  # an earlier attempt's tokens that were kept
    end, kept = before, 0
    for token_text in node.token_texts:
        end += len(token_text)
        if end > wrong.start():
            break
        kept += 1
    return search.Critique(keep=kept)


def main() -> None:
    with LLM("smollm2-135m", seed=5) as llm:
        result = cotrt.run(
            search.self_refine,
            llm,
            PROMPT,
            criticise=criticise,
            attempts=6,
            params=SamplingParams(temperature=1.0, max_tokens=40, stop="\n"),
        )
        print(result.tree)
        print(f"\n{PROMPT}{result.text}\n{result.stopped_by}, {result.usage}")


if __name__ == "__main__":
    main()
