"""What the searches by steps share: step delimiters, values of paths, duplicates."""

from __future__ import annotations

from collections.abc import Sequence

from cotrt.search.callbacks import check_int, check_one_of
from cotrt.search.scorers import AGGREGATES, Aggregate, Scorer, path_value
from cotrt.search.session import Session
from cotrt.search.tree import Node


def check_step_options(aggregate: str, delimiter: str, max_steps: int) -> None:
    """Check the options that all searches by steps have.

    Raises:
        InvalidRequestError: one is wrong.
    """
    from cotrt.errors import InvalidRequestError

    check_one_of("aggregate", aggregate, AGGREGATES)
    check_int("max_steps", max_steps, 1)
    if not isinstance(delimiter, str) or not delimiter:
        raise InvalidRequestError(f"delimiter={delimiter!r}: must be a str that is not empty")


async def take_step(
    session: Session,
    parents: Sequence[Node],
    counts: Sequence[int],
    *,
    delimiter: str,
    scorer: Scorer,
    aggregate: Aggregate,
    merge: bool = True,
) -> list[Node]:
    """Grow ``counts[i]`` children of each parent by one step, in one wave, and score them.

    Children of one parent with equal tokens are merged: the first stays, ``visits`` counts them.

    Returns:
        The children that are not pruned, those of the first parent first.
    """
    children = [
        child for parent, n in zip(parents, counts) if n for child in session.fork(parent, n)
    ]
    for parent in parents:
        session.retire(parent)
    await session.grow(children, delimiter=delimiter)
    if merge:
        merge_equal(session, children)
    alive = [child for child in children if child.state != "pruned" and child.token_ids]
    await session.score(alive, scorer)
    for child in alive:
        child.value = path_value(child, aggregate)
    await session.extract([child for child in alive if child.is_finished])
    for child in alive:
        if child.is_finished:
            session.let_go(child)
    return alive


def merge_equal(session: Session, nodes: Sequence[Node]) -> None:
    """Of nodes with the same parent and tokens only the first stays."""
    first: dict[tuple[int | None, tuple[int, ...], str], Node] = {}
    for node in nodes:
        if node.state == "pruned":
            continue
        kept = first.setdefault((node.parent, tuple(node.token_ids), node.state), node)
        kept.visits += 1
        if kept is not node:
            session.prune([node], f"equal to node {kept.id}")


def by_value(nodes: Sequence[Node]) -> list[Node]:
    """Best first; of equal ones the first made."""
    return sorted(nodes, key=lambda node: (-(node.value or 0.0), node.id))
