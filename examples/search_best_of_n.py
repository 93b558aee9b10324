"""Best of n: eight answers in one batch, and the model itself says which is right."""

from __future__ import annotations

import cotrt
from cotrt import LLM, SamplingParams, search

QUESTION = "A farmer has 15 sheep and buys 8 more. How many sheep does he have?"


def main() -> None:
    with LLM("smollm2-135m", seed=1) as llm:
        root = llm.branch([{"role": "user", "content": QUESTION}])
        result = cotrt.run(
            search.best_of_n,
            root,
            n=8,
            score=search.ask("\nIs this answer right? Answer:"),
            params=SamplingParams(temperature=0.8, max_tokens=64),
        )
        print(result.tree)
        print(f"\nthe best: {result.text!r}\n{result.usage}")


if __name__ == "__main__":
    main()
