"""Best of n: sample n answers at once, score them, keep the best."""

from __future__ import annotations

from typing import Any

from cotrt.options.sampling import SamplingParams
from cotrt.program.branch import Branch
from cotrt.program.llm import LLM
from cotrt.search.budget import Budget
from cotrt.search.callbacks import check_int
from cotrt.search.events import OnEvent
from cotrt.search.result import SearchResult
from cotrt.search.scorers import Scorer
from cotrt.search.session import Extract, Session


async def best_of_n(
    root: Branch | LLM,
    prompt: Any = None,
    *,
    n: int = 16,
    score: Scorer | LLM | None = None,
    accept: float | None = None,
    params: SamplingParams | None = None,
    budget: Budget | None = None,
    on_event: OnEvent | None = None,
    extract: Extract | None = None,
    every: int = 32,
) -> SearchResult:
    """`n` answers in one batch; the best finished one by score.

    Args:
        root: a branch, left unchanged, or an LLM.
        prompt: for an LLM: text, token ids or messages.
        n: answers.
        score: ``score(node) -> float``, sync or async, or an LLM that judges; default: the mean
            log-probability.
        accept: a score that is good enough: then the search stops and the rest is pruned.
        params, budget, on_event, extract: as in every search.
        every: with `accept`, tokens between two looks at what has finished.

    Returns:
        All answers are candidates; an unfinished one never comes before a finished one.

    Raises:
        InvalidRequestError: an argument that is wrong, or a score that is no finite number.
    """
    check_int("n", n, 1)
    check_int("every", every, 1)
    session = Session(
        "best_of_n",
        root,
        prompt,
        params=params,
        budget=budget,
        on_event=on_event,
        extract=extract,
    )
    scorer = session.scorer(score)
    async with session:
        growths = session.begin(session.fork(session.root, n))
        scored: set[int] = set()
        while len(scored) < len(growths):
            await session.advance(growths, None if accept is None else every)
            ended = [g for g in growths if g.done and g.node.id not in scored]
            # In the order in which they would end one token at a time: the same whatever else runs.
            ended.sort(key=lambda growth: (growth.sampled, growth.node.id))
            nodes = [growth.node for growth in ended]
            await session.score(nodes, scorer)
            await session.extract([node for node in nodes if node.state != "pruned"])
            scored.update(node.id for node in nodes)
            good = [n for n in nodes if n.is_finished and n.score is not None]
            if accept is not None and any(node.score >= accept for node in good):  # type: ignore[operator]
                session.stop("accepted")
                session.prune([g.node for g in growths if not g.done], "another was accepted")
                break
            for node in nodes:
                session.let_go(node)
    return await session.finish()
