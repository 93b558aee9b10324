"""Diverse verifier tree search: independent subtrees, each greedy by the scorer."""

from __future__ import annotations

from typing import Any

from cotrt.errors import InvalidRequestError
from cotrt.options.sampling import SamplingParams
from cotrt.program.branch import Branch
from cotrt.program.llm import LLM
from cotrt.search.budget import Budget
from cotrt.search.callbacks import check_int
from cotrt.search.events import OnEvent
from cotrt.search.result import SearchResult
from cotrt.search.scorers import Aggregate, Scorer
from cotrt.search.session import Extract, Session
from cotrt.search.steps import by_value, check_step_options, take_step
from cotrt.search.tree import Node


async def diverse_verifier_tree_search(
    root: Branch | LLM,
    prompt: Any = None,
    *,
    n: int = 16,
    width: int = 4,
    score: Scorer | LLM | None = None,
    aggregate: Aggregate = "last",
    delimiter: str = "\n\n",
    max_steps: int = 20,
    params: SamplingParams | None = None,
    budget: Budget | None = None,
    on_event: OnEvent | None = None,
    extract: Extract | None = None,
) -> SearchResult:
    r"""``n / width`` subtrees; in each, the best of `width` next steps goes on.

    All subtrees grow in one wave; they never compete, which keeps them different.

    Args:
        root: a branch, left unchanged, or an LLM.
        prompt: for an LLM: text, token ids or messages.
        n: steps grown in a wave; a multiple of `width`.
        width: candidates for each subtree's next step.
        score: ``score(node) -> float`` of a step, sync or async, or an LLM that judges; default:
            the mean log-probability of the path.
        aggregate: the value of a path from its steps' scores: "last", "min", "prod" or "mean".
        delimiter: ends a step; it is part of the step's text.
        max_steps: steps of a path at most.
        params: ``max_tokens`` is for one step; ``stop`` ends the whole answer.
        budget, on_event, extract: as in every search.

    Returns:
        One candidate a subtree, finished ones first.

    Raises:
        InvalidRequestError: an argument that is wrong, or a score that is no finite number.
    """
    check_int("width", width, 1)
    check_int("n", n, 1)
    if n % width:
        raise InvalidRequestError(f"n={n}: must be a multiple of width={width}")
    check_step_options(aggregate, delimiter, max_steps)
    session = Session(
        "diverse_verifier_tree_search",
        root,
        prompt,
        params=params,
        budget=budget,
        on_event=on_event,
        extract=extract,
    )
    scorer = session.scorer(score)
    async with session:
        tips: list[Node] = [session.root] * (n // width)
        for step in range(max_steps):
            # The subtrees' first steps are all children of the root: width for each, in order.
            parents = [session.root] if step == 0 else tips
            counts = [n] if step == 0 else [width] * len(tips)
            children = await take_step(
                session,
                parents,
                counts,
                delimiter=delimiter,
                scorer=scorer,
                aggregate=aggregate,
                merge=False,
            )
            tips = []
            for group in _subtrees(children, step, width):
                best, *rest = by_value(group)
                session.prune(rest, f"node {best.id} is better")
                if best.state == "kept":
                    tips.append(best)
            if session.stopped_by or not tips:
                break
        else:
            session.stop("max_steps")
    return await session.finish()


def _subtrees(children: list[Node], step: int, width: int) -> list[list[Node]]:
    """Children by subtree, in order."""
    groups: dict[int, list[Node]] = {}
    for child in children:
        assert child.parent is not None
        # Below the root, ids are given in order: subtree i has the i-th `width` of them.
        groups.setdefault((child.id - 1) // width if step == 0 else child.parent, []).append(child)
    return list(groups.values())
