"""Wall time of searches by steps against best-of-n, at equal tokens and batch width.

    python scripts/search/wall_time.py

All sample 16 branches of 160 tokens in all, as 8 waves of 20 where they go by steps; runs
alternate, and medians are compared.
"""

from __future__ import annotations

import statistics
import time

import cotrt
from cotrt import LLM, SamplingParams, search

PROMPT = "The history of the sea, told in many short steps. " * 8
WHOLE = SamplingParams(max_tokens=160, ignore_eos=True, temperature=1.0)
STEP = WHOLE.replace(max_tokens=20)
NEVER = "\u0000never"
STEPS = {"delimiter": NEVER, "max_steps": 8, "params": STEP}
SEARCHES = {
    "best-of-n": (search.best_of_n, {"n": 16, "params": WHOLE}),
    "beam, width 4, branching 4": (
        search.step_beam_search,
        {"width": 4, "branching": 4, **STEPS},
    ),
    "DVTS, n = 16, width 4": (
        search.diverse_verifier_tree_search,
        {"n": 16, "width": 4, **STEPS},
    ),
    "REBASE, n = 16": (search.rebase, {"n": 16, **STEPS}),
    "ToT, breadth 4, branching 4": (
        search.tree_of_thoughts,
        {"breadth": 4, "branching": 4, "depth": 8, "delimiter": NEVER, "params": STEP},
    ),
}


def main() -> None:
    times: dict[str, list[float]] = {name: [] for name in SEARCHES}
    tokens: dict[str, int] = {}
    with LLM("smollm2-135m", seed=0) as llm:
        for _ in range(8):
            for name, (fn, options) in SEARCHES.items():
                root = llm.branch(PROMPT)
                root.score(" x").result()  # the prompt is computed before the clock starts
                begun = time.perf_counter()
                result = cotrt.run(fn, root, **options)
                times[name].append(time.perf_counter() - begun)
                tokens[name] = result.usage.tokens_generated
                root.prune()
    base = statistics.median(times["best-of-n"][1:]) / tokens["best-of-n"]
    print("| search | tokens | seconds, median of 7 | time a token, best-of-n = 1 |")
    print("| --- | --- | --- | --- |")
    for name, each in times.items():
        middle = statistics.median(each[1:])
        print(f"| {name} | {tokens[name]} | {middle:.2f} | {middle / tokens[name] / base:.2f} |")


if __name__ == "__main__":
    main()
