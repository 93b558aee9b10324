"""Early exit: ask for the answer while the model thinks, and stop when it no longer changes."""

from __future__ import annotations

import cotrt
from cotrt import LLM, SamplingParams, search

QUESTION = "What is the capital of France? Think about it at length before you answer."


def main() -> None:
    with LLM("smollm2-135m", seed=6) as llm:
        result = cotrt.run(
            search.probe_early_exit,
            llm,
            [{"role": "user", "content": QUESTION}],
            every=24,
            suffix="\nIn one word, the capital of France is",
            probe_tokens=6,
            agree=2,
            extract=lambda text: text.split()[0].strip(".,!*") if text.split() else None,
            params=SamplingParams(temperature=0.8, max_tokens=400),
        )
        for node in result.tree.nodes:
            if node.kind == "probe":
                print(f"{node.answer!r:>16} {node.state}")
        thought = sum(node.num_sampled for node in result.tree.nodes if node.kind == "step")
        print(f"answer {result.answer!r} after {thought} tokens of thinking: {result.stopped_by}")


if __name__ == "__main__":
    main()
