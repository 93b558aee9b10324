"""Monte Carlo tree search: sixteen rollouts, four at a time, and a vote weighted by reward."""

from __future__ import annotations

import cotrt
from cotrt import LLM, SamplingParams, search

QUESTION = "Ben reads 12 pages a day. How many pages does he read in 3 days? Think in short lines."


def main() -> None:
    with LLM("smollm2-135m", seed=4) as llm:
        result = cotrt.run(
            search.mcts,
            llm,
            [{"role": "user", "content": QUESTION}],
            score=search.ask("\nIs the reasoning above right? Answer:"),
            rollouts=16,
            parallel=4,
            branching=3,
            depth=4,
            choose_by="vote",
            extract="number",
            delimiter="\n",
            params=SamplingParams(temperature=0.8, max_tokens=32),
            rollout_tokens=64,
        )
        print(result.tree.render(max_nodes=30))
        print(f"\nanswer {result.answer}, {result.usage}")


if __name__ == "__main__":
    main()
