"""Accuracy and cost of the searches on 100 generated problems and the starter model.

    python scripts/search/arithmetic.py [--problems 100] [--out results.jsonl]

Prints the table of docs/search.md. Every search draws about as many tokens: 8 samples, or waves
of 8 steps. Two scorers: a verifier that recomputes the equations of a path, as a program with a
calculator would, and, for two of the searches, the mean log-probability. With --out, a run that
was cut short goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import cotrt
from cotrt import LLM, SamplingParams, search
from cotrt.search.result import SearchResult

SHOTS = """\
Question: Tom has 2 bags with 5 marbles each. He loses 3 marbles. How many are left?
Tom has 2 * 5 = 10 marbles.
He loses 3, so 10 - 3 = 7 are left.
The answer is 7. END

Question: Mia has 12 pens. She buys 3 packs of 4 pens. How many pens does she have?
She buys 3 * 4 = 12 pens.
She has 12 + 12 = 24 pens.
The answer is 24. END

Question: A shelf holds 20 books. 6 are taken away, and 5 are put back. How many are there?
After some are taken, 20 - 6 = 14 are left.
After some are put back, 14 + 5 = 19 are there.
The answer is 19. END

"""
AT_ONCE = 4  # problems
NAMES = ("Anna", "Ben", "Carla", "David", "Eva", "Frank", "Gina", "Hugo")
THINGS = ("apples", "coins", "stamps", "shells", "cards", "nuts")
ANSWER = re.compile(r"The answer is (-?\d+)")
EQUATION = re.compile(r"(\d+) ([-+*]) (\d+) = (-?\d+)")
STOPS = (" END", "\n\n", "Question")
STEP = SamplingParams(temperature=0.7, max_tokens=40, stop=STOPS, seed=0)
WHOLE = STEP.replace(max_tokens=100)


def problem(rng: random.Random) -> tuple[str, int]:
    """A question of one or two operations, and its answer."""
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    a, b, c = rng.randint(2, 9), rng.randint(2, 9), rng.randint(2, 15)
    kind = rng.randrange(5)
    if kind == 3:
        text = f"{name} has {b} {thing} and finds {c} more. "
        return text + f"How many {thing} does {name} have?", b + c
    if kind == 4:
        text = f"{name} has {a} bags with {b} {thing} each. "
        return text + f"How many {thing} does {name} have?", a * b
    if kind == 0:
        c = min(c, a * b - 1)
        text = f"{name} has {a} boxes with {b} {thing} each. {name} loses {c} {thing}. "
        return text + f"How many {thing} are left?", a * b - c
    if kind == 1:
        text = f"{name} has {c} {thing}. {name} buys {a} packs of {b} {thing}. "
        return text + f"How many {thing} does {name} have?", c + a * b
    start = a + b + c
    text = f"{name} has {start} {thing}. {name} gives {a} away, and then finds {c} more. "
    return text + f"How many {thing} does {name} have?", start - a + c


def verify(node: search.Node) -> float:
    """Share of a path's equations that are right, with a little for saying something at all."""
    right = [
        {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[op] == int(c)
        for a, op, b, c in EQUATION.findall(node.path_text)
    ]
    return (sum(right) + 0.5) / (len(right) + 1)


def methods(scorer: Any) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Name to (search, options)."""
    steps = {"score": scorer, "delimiter": "\n", "params": STEP}
    return {
        "best-of-n, n = 8": (search.best_of_n, {"n": 8, "score": scorer, "params": WHOLE}),
        "beam, width 2 of 8": (
            search.step_beam_search,
            {"width": 2, "branching": 4, "max_steps": 5, **steps},
        ),
        "DVTS, n = 8, width 4": (
            search.diverse_verifier_tree_search,
            {"n": 8, "width": 4, "max_steps": 5, **steps},
        ),
        "REBASE, n = 8": (search.rebase, {"n": 8, "max_steps": 5, **steps}),
        "ToT, breadth 2, branching 4": (
            search.tree_of_thoughts,
            {"breadth": 2, "branching": 4, "depth": 4, **steps},
        ),
        "MCTS, 8 rollouts": (
            search.mcts,
            {
                "rollouts": 8,
                "parallel": 4,
                "branching": 3,
                "depth": 3,
                "rollout_tokens": 100,
                **steps,
            },
        ),
    }


def plain_methods() -> dict[str, tuple[Any, dict[str, Any]]]:
    vote = {"n": 8, "extract": ANSWER, "params": WHOLE}
    return {
        "greedy": (search.best_of_n, {"n": 1, "params": WHOLE.replace(temperature=0.0)}),
        "one sample": (search.best_of_n, {"n": 1, "params": WHOLE}),
        "self-consistency, n = 8, full": (search.self_consistency, {**vote, "early_stop": None}),
        "self-consistency, n = 16, full": (
            search.self_consistency,
            {**vote, "n": 16, "early_stop": None},
        ),
        "self-consistency, n = 16, posterior": (search.self_consistency, {**vote, "n": 16}),
        "self-consistency, n = 16, window 5": (
            search.self_consistency,
            {**vote, "n": 16, "early_stop": "window"},
        ),
    }


def run_all(llm: LLM, prompts: list[str], fn: Any, options: dict[str, Any]) -> list[SearchResult]:
    """The search on every prompt, AT_ONCE at a time."""

    async def ask(prompt: str) -> SearchResult:
        result: SearchResult = await fn(llm, prompt, **{"extract": ANSWER, **options})
        return result

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "results.jsonl"
        return cotrt.run(search.run_many, ask, prompts, out=out, concurrency=AT_ONCE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", type=int, default=100)
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    rng = random.Random(24)
    problems = [problem(rng) for _ in range(arguments.problems)]
    by_logprob = methods(None)
    groups = {
        "": plain_methods(),
        "mean log-probability": {name: by_logprob[name] for name in list(by_logprob)[:2]},
        "verifier": methods(verify),
    }
    lines: list[dict[str, Any]] = []
    if arguments.out is not None and arguments.out.exists():
        lines = [json.loads(line) for line in arguments.out.read_text().splitlines()]
    done = {(line["search"], line["scorer"]) for line in lines}
    with LLM("smollm2-135m", seed=0) as llm:
        prompts = [f"{SHOTS}Question: {question}\n" for question, _ in problems]
        run_all(llm, prompts[:1], search.best_of_n, {"n": 8, "params": WHOLE})  # warm up
        for scorer, group in groups.items():
            for name, (fn, options) in group.items():
                if (name, scorer) in done:
                    continue
                begun, before = time.perf_counter(), llm.metrics
                results = run_all(llm, prompts, fn, options)
                seconds = time.perf_counter() - begun
                spent = {key: llm.metrics[key] - before[key] for key in before}
                right = [str(r.answer) == str(a) for r, (_, a) in zip(results, problems)]
                line = {
                    "search": name,
                    "scorer": scorer,
                    "right": sum(right),
                    "tokens": statistics.mean(r.usage.tokens_generated for r in results),
                    "computed": spent["prompt_tokens_computed"] / len(problems),
                    "reused": spent["prompt_tokens_reused"] / len(problems),
                    "seconds": seconds / len(problems),
                    "answers": [r.answer for r in results],
                }
                lines.append(line)
                sys.stderr.write(f"{name}: {line['right']} right, {seconds:.0f} s\n")
                if arguments.out is not None:
                    with arguments.out.open("a") as file:
                        file.write(json.dumps(line) + "\n")
    answers = {line["search"]: line["answers"] for line in lines if not line["scorer"]}
    full = answers["self-consistency, n = 16, full"]
    for rule in ("posterior", "window 5"):
        stopped = answers[f"self-consistency, n = 16, {rule}"]
        same = sum(a == b for a, b in zip(stopped, full))
        print(f"{rule}: the same answer as the full vote of 16 in {same} of {len(full)}")
    print("| search | scorer | right | tokens | prompt computed | reused | seconds |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for line in lines:
        print(
            f"| {line['search']} | {line['scorer']} | {line['right']} | {line['tokens']:.0f} | "
            f"{line['computed']:.0f} | {line['reused']:.0f} | {line['seconds']:.2f} |"
        )


if __name__ == "__main__":
    main()
