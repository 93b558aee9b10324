"""Diverse verifier tree search: four subtrees that do not compete, each greedy by a scorer."""

from __future__ import annotations

import cotrt
from cotrt import LLM, SamplingParams, search

PROMPT = "Three facts about the sea, one a line:\n1."


def variety(node: search.Node) -> float:
    """A scorer of one's own: different words among all words of the path."""
    words = node.path_text.lower().split()
    return len(set(words)) / (len(words) + 1)


def main() -> None:
    with LLM("smollm2-135m", seed=3) as llm:
        result = cotrt.run(
            search.diverse_verifier_tree_search,
            llm,
            PROMPT,
            n=8,
            width=2,
            score=variety,
            delimiter="\n",
            max_steps=3,
            params=SamplingParams(temperature=0.8, max_tokens=32),
            budget=search.Budget(max_tokens=600),
        )
        for candidate in result.candidates:
            print(f"{candidate.score:.3f} {PROMPT[-2:]}{candidate.text.rstrip()}\n")
        print(result.stopped_by, result.usage)


if __name__ == "__main__":
    main()
