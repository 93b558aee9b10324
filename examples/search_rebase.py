"""REBASE on a model without weights: good steps get more children than bad ones."""

from __future__ import annotations

import cotrt
from cotrt import LLM, search
from cotrt.testing import ScriptedModel

STEPS = ("up\n", "down\n")


def next_probs(ids: list[int]) -> dict[int, float]:
    """Three steps, each up or down, and then the end (token 0)."""
    line = "".join(map(chr, ids)).rpartition("?")[2]
    if line.count("\n") == 3:
        return {0: 1.0}
    part = line.rpartition("\n")[2]
    return {ord(step[len(part)]): 0.5 for step in STEPS if step.startswith(part)}


def main() -> None:
    model = ScriptedModel(next_probs, vocab_size=128, eos_token_id=0)
    with LLM(model, kv_cache_memory_bytes=2**20) as llm:
        result = cotrt.run(
            search.rebase,
            llm,
            "Which way?",
            n=12,
            temperature=0.3,
            delimiter="\n",
            score=lambda node: node.path_text.count("up") / node.depth,
        )
        print(result.tree)
        print(f"\nthe best way: {result.text.split()}")


if __name__ == "__main__":
    main()
