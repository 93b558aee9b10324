"""REBASE: children in proportion to the softmax of their parents' scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
from cotrt.search.steps import check_step_options, take_step
from cotrt.search.tree import Node


async def rebase(
    root: Branch | LLM,
    prompt: Any = None,
    *,
    n: int = 16,
    temperature: float = 0.2,
    score: Scorer | LLM | None = None,
    aggregate: Aggregate = "last",
    delimiter: str = "\n\n",
    max_steps: int = 20,
    params: SamplingParams | None = None,
    budget: Budget | None = None,
    on_event: OnEvent | None = None,
    extract: Extract | None = None,
) -> SearchResult:
    r"""`n` paths in all: a node's share of the next wave is the softmax of its value.

    Finished paths keep their place among the n, so that the waves shrink as paths finish. A node
    whose share rounds to nothing is pruned.

    Args:
        root: a branch, left unchanged, or an LLM.
        prompt: for an LLM: text, token ids or messages.
        n: paths.
        temperature: of the softmax over values: small is greedy, large is even; not the model's.
        score: ``score(node) -> float`` of a step, sync or async, or an LLM that judges; default:
            the mean log-probability of the path.
        aggregate: the value of a path from its steps' scores: "last", "min", "prod" or "mean".
        delimiter: ends a step; it is part of the step's text.
        max_steps: steps of a path at most.
        params: ``max_tokens`` is for one step; ``stop`` ends the whole answer.
        budget, on_event, extract: as in every search.

    Returns:
        Finished paths are candidates before unfinished ones.

    Raises:
        InvalidRequestError: an argument that is wrong, or a score that is no finite number.
    """
    check_int("n", n, 1)
    if isinstance(temperature, bool) or not isinstance(temperature, (int, float)):
        raise InvalidRequestError(f"temperature={temperature!r}: must be a number above 0")
    if not (math.isfinite(temperature) and temperature > 0):
        raise InvalidRequestError(f"temperature={temperature!r}: must be a number above 0")
    check_step_options(aggregate, delimiter, max_steps)
    session = Session(
        "rebase",
        root,
        prompt,
        params=params,
        budget=budget,
        on_event=on_event,
        extract=extract,
    )
    scorer = session.scorer(score)
    async with session:
        frontier: list[Node] = [session.root]
        counts = [n]
        left = n
        for _ in range(max_steps):
            children = await take_step(
                session,
                frontier,
                counts,
                delimiter=delimiter,
                scorer=scorer,
                aggregate=aggregate,
                merge=False,
            )
            left -= sum(child.is_finished for child in children)
            running = [child for child in children if child.state == "kept"]
            if session.stopped_by or not running:
                break
            shares = share_by_softmax([node.value or 0.0 for node in running], left, temperature)
            session.prune([n for n, share in zip(running, shares) if not share], "no share")
            frontier = [node for node, share in zip(running, shares) if share]
            counts = [share for share in shares if share]
        else:
            session.stop("max_steps")
    return await session.finish()


def share_by_softmax(values: Sequence[float], total: int, temperature: float) -> list[int]:
    """Whole shares of `total` in proportion to ``softmax(values / temperature)``.

    Largest remainders get the odd ones, of equal ones the first: the shares sum to `total`.
    """
    top = max(values)
    weights = [math.exp((value - top) / temperature) for value in values]
    exact = [total * weight / sum(weights) for weight in weights]
    shares = [math.floor(x) for x in exact]
    odd = total - sum(shares)
    order = sorted(range(len(values)), key=lambda i: (shares[i] - exact[i], i))
    for i in order[:odd]:
        shares[i] += 1
    return shares
