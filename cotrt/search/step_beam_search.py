"""Beam search over steps of reasoning."""

from __future__ import annotations

from typing import Any

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


async def step_beam_search(
    root: Branch | LLM,
    prompt: Any = None,
    *,
    width: int = 4,
    branching: int = 4,
    score: Scorer | LLM | None = None,
    aggregate: Aggregate = "last",
    delimiter: str = "\n\n",
    max_steps: int = 20,
    params: SamplingParams | None = None,
    budget: Budget | None = None,
    on_event: OnEvent | None = None,
    extract: Extract | None = None,
) -> SearchResult:
    r"""Every beam grows `branching` next steps; the `width` best go on.

    A beam that finishes leaves the running ones and makes the beam one narrower; the search ends
    when `width` are finished, none is running, or after `max_steps`.

    Args:
        root: a branch, left unchanged, or an LLM.
        prompt: for an LLM: text, token ids or messages.
        width: beams.
        branching: next steps a beam; the first step has ``width * branching``.
        score: ``score(node) -> float`` of a step, sync or async, or an LLM that judges; default:
            the mean log-probability of the path.
        aggregate: the value of a path from its steps' scores: "last", "min", "prod" or "mean".
        delimiter: ends a step; it is part of the step's text.
        max_steps: steps of a path at most.
        params: ``max_tokens`` is for one step; ``stop`` ends the whole answer.
        budget, on_event, extract: as in every search.

    Returns:
        Finished beams are candidates before unfinished ones.

    Raises:
        InvalidRequestError: an argument that is wrong, or a score that is no finite number.
    """
    check_int("width", width, 1)
    check_int("branching", branching, 1)
    check_step_options(aggregate, delimiter, max_steps)
    session = Session(
        "step_beam_search",
        root,
        prompt,
        params=params,
        budget=budget,
        on_event=on_event,
        extract=extract,
    )
    scorer = session.scorer(score)
    async with session:
        beams: list[Node] = [session.root]
        num_finished = 0
        for step in range(max_steps):
            counts = [width * branching if step == 0 else branching] * len(beams)
            children = await take_step(
                session,
                beams,
                counts,
                delimiter=delimiter,
                scorer=scorer,
                aggregate=aggregate,
            )
            num_finished += sum(child.is_finished for child in children)
            running = by_value([child for child in children if child.state == "kept"])
            beams = running[: max(0, width - num_finished)]
            if session.stopped_by or not beams:
                session.prune(running[width:], "not among the best")
                break
            session.prune(running[len(beams) :], "not among the best")
        else:
            session.stop("max_steps")
    return await session.finish()
