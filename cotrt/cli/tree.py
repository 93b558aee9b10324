"""`cotrt tree`: run a search on a question, and draw the tree that it grew."""

from __future__ import annotations

import argparse
from typing import Any

from cotrt.cli.checks import at_least, check_can_write
from cotrt.cli.engine_flags import add_engine_flags, add_model_argument, engine_options, model_of
from cotrt.cli.sampling_flags import add_sampling_flags, check_sampling, sampling_params

HELP = "search for an answer to a question, and draw the tree"
EXAMPLE = "cotrt tree smollm2-135m --question 'What is 7 times 8?' --method self_consistency --n 8"

METHODS = ("self_consistency", "best_of_n", "step_beam_search", "tree_of_thoughts", "mcts")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    add = parser.add_argument
    add("--question", required=True, help="what to think about")
    add("--raw", action="store_true", help="the question is a prompt as it stands, no chat")
    add("--method", choices=METHODS, default="tree_of_thoughts", help="default: %(default)s")
    add("--n", type=at_least(1), default=4, help="branches side by side (default: %(default)s)")
    add("--depth", type=at_least(1), default=3, help="steps of a path (default: %(default)s)")
    add("--max-branches", type=at_least(0), metavar="N", help="stop after so many branches")
    add("--budget", type=at_least(0), metavar="TOKENS", help="stop after so many sampled tokens")
    add("--deadline", type=at_least(0, float), metavar="SECONDS", help="stop after so long")
    add("--html", metavar="FILE", help="write the tree as a page, too")
    add_sampling_flags(parser)
    add_engine_flags(parser)


def run(options: argparse.Namespace) -> int:
    """Search and draw."""
    import cotrt
    from cotrt import LLM, search

    model = model_of(options)
    check_sampling(options)
    check_can_write(options.html, "--html")
    with LLM(model, **engine_options(options)) as llm:
        params = sampling_params(options, llm)
        if not params.is_max_tokens_set:
            params = params.replace(max_tokens=128)
        prompt: Any = options.question
        if not options.raw and getattr(llm.tokenizer, "has_chat_template", False):
            prompt = [{"role": "user", "content": options.question}]
        budget = search.Budget(
            max_tokens=options.budget,
            max_branches=options.max_branches,
            deadline_s=options.deadline,
        )
        with llm.branch(prompt) as root:
            result = cotrt.run(
                getattr(search, options.method),
                root,
                params=params,
                budget=budget,
                **_shape(options),
            )
            print(result.tree)
            if result.votes is not None and not result.votes.rows:
                print("\nno answer: no sample voted; raise --max-tokens where they were cut")
            else:
                print(f"\nanswer: {result.answer if result.answer is not None else _text(result)}")
            usage = result.usage
            print(f"{usage}\nstopped by: {result.stopped_by}")
            if options.html:
                from cotrt import viewer

                viewer.save_html(result.tree, options.html)
                print(f"wrote {options.html}")
    return 0


def _shape(options: argparse.Namespace) -> dict[str, Any]:
    """The method's own arguments."""
    n, depth = options.n, options.depth
    if options.method == "self_consistency":
        return {"n": n}
    if options.method == "best_of_n":
        return {"n": n}
    if options.method == "step_beam_search":
        return {"width": max(1, n // 2), "branching": n, "max_steps": depth}
    if options.method == "tree_of_thoughts":
        return {"breadth": max(1, n // 2), "branching": n, "depth": depth}
    return {"rollouts": n * depth, "parallel": n, "branching": n, "depth": depth}


def _text(result: Any) -> str:
    return "" if result.best is None else str(getattr(result.best, "text", result.best))
