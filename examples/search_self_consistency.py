"""Self-consistency: samples vote, and the vote stops as soon as it is decided."""

from __future__ import annotations

import re

import cotrt
from cotrt import LLM, SamplingParams, search

PROMPT = """\
Question: Tom has 2 bags with 5 marbles each. How many marbles does he have?
Answer: 2 bags of 5 marbles are 2 * 5 = 10 marbles. The answer is 10.

Question: Mia buys 3 packs of 4 pencils. How many pencils does she have?
Answer:"""


def main() -> None:
    with LLM("smollm2-135m", seed=1) as llm:
        result = cotrt.run(
            search.self_consistency,
            llm,
            PROMPT,
            n=24,
            extract=re.compile(r"The answer is (-?\d+)"),
            early_stop="posterior",
            params=SamplingParams(temperature=0.7, max_tokens=48, stop="\n"),
        )
        print(result.votes)
        print(f"\nthe vote: {result.answer} ({result.stopped_by})\n{result.usage}")


if __name__ == "__main__":
    main()
