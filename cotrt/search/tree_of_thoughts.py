"""Tree of thoughts: breadth-first or depth-first search over thoughts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Literal

from cotrt.errors import InvalidRequestError
from cotrt.options.sampling import SamplingParams
from cotrt.program.branch import Branch
from cotrt.program.llm import LLM
from cotrt.search.budget import Budget
from cotrt.search.callbacks import as_score, call, call_each, check_int, check_one_of
from cotrt.search.events import OnEvent
from cotrt.search.result import SearchResult
from cotrt.search.session import Extract, Session
from cotrt.search.steps import by_value, check_step_options, merge_equal
from cotrt.search.tree import Node

Propose = str | Callable[[Node], Any]


async def tree_of_thoughts(
    root: Branch | LLM,
    prompt: Any = None,
    *,
    score: Any = None,
    propose: Propose | None = None,
    breadth: int = 5,
    branching: int = 5,
    depth: int = 3,
    method: Literal["bfs", "dfs"] = "bfs",
    prune_below: float | None = None,
    accept: float | None = None,
    method_evaluate: Literal["value", "vote"] = "value",
    method_select: Literal["greedy", "sample"] = "greedy",
    n_evaluate_sample: int = 1,
    delimiter: str = "\n",
    params: SamplingParams | None = None,
    budget: Budget | None = None,
    on_event: OnEvent | None = None,
    extract: Extract | None = None,
) -> SearchResult:
    r"""Grow thoughts, judge each state, and go on from the good ones.

    The names of the ways to evaluate and select, and ``n_evaluate_sample``, are those of the
    paper's code; `branching` is its n_generate_sample, `breadth` its n_select_sample.

    Args:
        root: a branch, left unchanged, or an LLM.
        prompt: for an LLM: text, token ids or messages.
        score: ``score(node) -> float`` of the state that ends here, sync or async, or an LLM that
            judges; default: the mean log-probability of the path. With "vote": ``score(nodes) ->
            one number a node`` of all states of a level.
        propose: None: thoughts are sampled. A function ``node -> list of texts``, sync or async:
            they are forced. A text: forced after a fork of the node, and every line that the model
            then writes is a thought.
        breadth: states kept of a level ("bfs"), or of a node's children ("dfs").
        branching: thoughts grown from a state, at most.
        depth: thoughts of a solution: a path of so many is finished.
        method: "bfs", or "dfs", which follows the best state first and backtracks.
        prune_below: states with a smaller value are pruned.
        accept: a finished path of this value ends the search.
        method_evaluate: "value" of each state alone, or "vote" among the states.
        method_select: "greedy", or "sample": without replacement, in proportion to the values.
        n_evaluate_sample: how often each state is scored; the value is the mean.
        delimiter: ends a thought; it is part of the thought's text.
        params: ``max_tokens`` is for one thought; ``stop`` ends the whole answer. Its seed is
            "sample"'s, too.
        budget, on_event, extract: as in every search.

    Returns:
        Finished paths are candidates before unfinished ones.

    Raises:
        InvalidRequestError: an argument that is wrong, or a value that is no finite number.
    """
    for name, value in (("breadth", breadth), ("branching", branching), ("depth", depth)):
        check_int(name, value, 1)
    check_int("n_evaluate_sample", n_evaluate_sample, 1)
    check_one_of("method", method, ("bfs", "dfs"))
    check_one_of("method_evaluate", method_evaluate, ("value", "vote"))
    check_one_of("method_select", method_select, ("greedy", "sample"))
    check_step_options("last", delimiter, depth)
    if propose is not None and not callable(propose) and not isinstance(propose, str):
        raise InvalidRequestError(f"propose={propose!r}: must be a function of a node, or a text")
    if method_evaluate == "vote" and not callable(score):
        raise InvalidRequestError('method_evaluate="vote" needs score(nodes) -> numbers')
    session = Session(
        "tree_of_thoughts",
        root,
        prompt,
        params=params,
        budget=budget,
        on_event=on_event,
        extract=extract,
    )
    scorer: Any = score if method_evaluate == "vote" else session.scorer(score)
    rng = random.Random(params.seed if params is not None and params.seed is not None else 0)

    async def expand(parents: Sequence[Node]) -> list[Node]:
        """The states one thought further, judged, without those below the threshold."""
        if propose is None:
            children = [c for parent in parents for c in session.fork(parent, branching)]
            await session.grow(children, delimiter=delimiter)
        else:
            children = await _propose(session, parents, propose, branching, delimiter)
        merge_equal(session, children)
        children = [c for c in children if c.state != "pruned" and c.token_ids]
        if method_evaluate == "vote":
            await _vote(session, children, scorer, n_evaluate_sample)
        else:
            totals = [0.0] * len(children)
            for _ in range(n_evaluate_sample):
                await session.score(children, scorer)
                totals = [total + (c.score or 0.0) for total, c in zip(totals, children)]
            for total, child in zip(totals, children):
                child.value = child.score = total / n_evaluate_sample
        for child in children:
            if prune_below is not None and (child.value or 0.0) < prune_below:
                session.prune([child], f"below {prune_below}")
            elif child.state == "kept" and child.depth == depth and child.finish_reason != "length":
                session.set_state(child, "finished", f"{depth} thoughts")
        children = [child for child in children if child.state != "pruned"]
        await session.extract([child for child in children if child.is_finished])
        for child in children:
            if child.is_finished:
                session.let_go(child)
        if accept is not None and any(c.is_finished and c.value >= accept for c in children):  # type: ignore[operator]
            session.stop("accepted")
        return children

    async with session:
        if method == "bfs":
            frontier = [session.root]
            for _ in range(depth):
                children = await expand(frontier)
                for node in frontier:
                    session.retire(node)
                running = [child for child in children if child.state == "kept"]
                frontier = _select(running, breadth, method_select, rng)
                kept = {node.id for node in frontier}
                session.prune([n for n in running if n.id not in kept], "not selected")
                frontier = [node for node in frontier if node.depth < depth]
                if session.stopped_by or not frontier:
                    break
        else:
            stack = [session.root]
            while stack and not session.stopped_by:
                node = stack.pop()
                children = await expand([node])
                session.retire(node)
                running = [c for c in children if c.state == "kept" and c.depth < depth]
                chosen = by_value(_select(running, breadth, method_select, rng))
                kept = {child.id for child in chosen}
                session.prune([c for c in running if c.id not in kept], "not selected")
                stack.extend(reversed(chosen))
    return await session.finish()


async def _propose(
    session: Session,
    parents: Sequence[Node],
    propose: Propose,
    branching: int,
    delimiter: str,
) -> list[Node]:
    """Children that hold proposed thoughts, as forced text."""
    if isinstance(propose, str):
        askers = [node for parent in parents for node in session.fork(parent, 1, "proposal")]
        for asker in askers:
            session.force(asker, propose, special=True)
        starts = [len(asker.text) for asker in askers]
        await session.grow(askers)
        lists: list[Any] = [[] for _ in parents]
        for index, (asker, start) in enumerate(zip(askers, starts)):
            lines = (line.strip() for line in asker.text[start:].splitlines())
            lists[index] = [line for line in lines if line]
        session.prune(askers, "it was only asked for thoughts")
    else:
        lists = await call_each("propose", propose, parents)
    children = []
    for parent, thoughts in zip(parents, lists):
        texts = list(dict.fromkeys(thoughts))[:branching]
        if not all(isinstance(text, str) and text for text in texts):
            raise InvalidRequestError(f"propose gave {thoughts!r}: must be a list of texts")
        for child, text in zip(session.fork(parent, len(texts)) if texts else [], texts):
            whole = text if text.endswith(delimiter) else text + delimiter
            session.force(child, whole)
            children.append(child)
    return children


async def _vote(
    session: Session, nodes: Sequence[Node], score: Callable[[Sequence[Node]], Any], times: int
) -> None:
    """The value of each is the mean of what `score` gives for all of them together."""
    totals = [0.0] * len(nodes)
    for _ in range(times if nodes else 0):
        values = list(await call(score, list(nodes)))
        if len(values) != len(nodes):
            raise InvalidRequestError(
                f"score gave {len(values)} values for {len(nodes)} states: one each is needed"
            )
        for index, value in enumerate(values):
            totals[index] += as_score(value, "score", nodes[index])
    for node, total in zip(nodes, totals):
        node.value = node.score = total / times


def _select(nodes: Sequence[Node], count: int, method: str, rng: random.Random) -> list[Node]:
    """`count` of the nodes: the best, or drawn in proportion to their values."""
    if method == "greedy" or len(nodes) <= count:
        return by_value(nodes)[:count]
    # Values may be negative (log-probabilities): they are shifted so that the least is near 0.
    values = [node.value or 0.0 for node in nodes]
    low = min(values)
    weights = [v if low >= 0 else v - low + 1e-6 for v in values]
    left, chosen = list(range(len(nodes))), []
    for _ in range(count):
        total = sum(weights[i] for i in left)
        [pick] = rng.choices(left, [weights[i] if total else 1.0 for i in left])
        left.remove(pick)
        chosen.append(nodes[pick])
    return chosen
