"""Self-refine and reflexion: try, criticise, go back to a good point, try again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cotrt.errors import InvalidRequestError
from cotrt.options.sampling import SamplingParams
from cotrt.program.branch import Branch
from cotrt.program.llm import LLM
from cotrt.search.budget import Budget
from cotrt.search.callbacks import call, check_int
from cotrt.search.events import OnEvent
from cotrt.search.result import SearchResult
from cotrt.search.scorers import Scorer
from cotrt.search.session import Extract, Session, ranking
from cotrt.search.tree import Node


@dataclass(frozen=True)
class Critique:
    """What is wrong with an attempt, and from where the next one goes on.

    Attributes:
        text: forced before the next attempt.
        keep: tokens of the attempt that the next one keeps; None: all of them, the text follows
            the attempt; 0: none, the text follows what was before the attempt (reflexion).
        special: encode special tokens in the text; False is for text of tools and models.
    """

    text: str = ""
    keep: int | None = None
    special: bool = False


async def self_refine(
    root: Branch | LLM,
    prompt: Any = None,
    *,
    criticise: str | Callable[[Node], Any],
    attempts: int = 3,
    done: Callable[[Node], Any] | None = None,
    retry: str = "\n",
    score: Scorer | LLM | None = None,
    critique_tokens: int = 128,
    params: SamplingParams | None = None,
    budget: Budget | None = None,
    on_event: OnEvent | None = None,
    extract: Extract | None = None,
) -> SearchResult:
    r"""Up to `attempts` tries, each after a critique of the one before.

    Args:
        root: a branch, left unchanged, or an LLM.
        prompt: for an LLM: text, token ids or messages.
        criticise: ``criticise(node)`` of an attempt, sync or async: None (nothing is wrong: the
            search ends), a text, or a `Critique`. Or a text itself: it is forced after the attempt,
            the model writes the critique, `retry` is forced, and the next attempt follows.
        attempts: at most.
        done: ``done(node) -> bool``: the attempt is good, the search ends; sync or async.
        retry: forced between the model's critique and the next attempt.
        score: chooses the best attempt where none was good; default: the last finished one wins.
        critique_tokens: of one critique of the model at most.
        params, budget, on_event, extract: as in every search.

    Returns:
        The attempts are the candidates; ``answer`` without `extract` is the winning attempt's own
        text.

    Raises:
        InvalidRequestError: an argument that is wrong.
    """
    check_int("attempts", attempts, 1)
    check_int("critique_tokens", critique_tokens, 1)
    if not callable(criticise) and not (isinstance(criticise, str) and criticise):
        raise InvalidRequestError(f"criticise={criticise!r}: must be a function or a text")
    session = Session(
        "self_refine",
        root,
        prompt,
        params=params,
        budget=budget,
        on_event=on_event,
        extract=extract,
    )
    scorer = None if score is None else session.scorer(score)
    tries: list[Node] = []
    good: Node | None = None
    async with session:
        base: Node | None = session.root
        for number in range(attempts):
            node = _child(session, base, "step")
            if node is None:
                break
            await session.grow([node])
            if node.state == "pruned":
                break
            tries.append(node)
            if scorer is not None:
                await session.score([node], scorer)
            await session.extract([node])
            if done is not None and await call(done, node):
                good = node
                break
            if session.stopped_by or number == attempts - 1:
                break
            if callable(criticise):
                critique = await call(criticise, node)
                if critique is None:
                    good = node
                    break
                base = _apply(session, node, critique)
            else:
                base = await _ask(session, node, criticise, retry, critique_tokens)
            if base is None:
                break
        if good is not None:
            session.stop("accepted")
        elif len(tries) == attempts:
            session.stop("max_steps")
    best = good
    if best is None and tries:
        finished = [node for node in tries if node.is_finished]
        best = ranking(tries)[0] if scorer is not None else (finished or tries)[-1]
    answer = best.path[-1].text if best is not None and extract is None else None
    return await session.finish(tries, best=best, answer=answer)


def _child(session: Session, base: Node | None, kind: str) -> Node | None:
    """A fork of `base`, or None where the budget has no branches."""
    assert base is not None
    children = session.fork(base, 1, kind)
    return children[0] if children else None


def _apply(session: Session, node: Node, critique: Any) -> Node | None:
    """The node from which the next attempt goes on."""
    if isinstance(critique, str):
        critique = Critique(critique)
    if not isinstance(critique, Critique):
        raise InvalidRequestError(
            f"criticise gave {critique!r}: must be None, a text or a Critique"
        )
    keep = critique.keep
    if keep is None or keep == node.num_tokens:
        base = node
    else:
        if type(keep) is not int or not 0 <= keep <= node.num_tokens:
            raise InvalidRequestError(
                f"Critique(keep={keep!r}): must be from 0 to the attempt's {node.num_tokens} tokens"
            )
        assert node.parent is not None
        kept = session.copy(node, keep) if keep else session.tree.nodes[node.parent]
        if kept is None:
            return None
        base = kept
    if not critique.text:
        return base
    children = session.fork(base, 1, "critique")
    if children:
        session.force(children[0], critique.text, special=critique.special)
    return children[0] if children else None


async def _ask(
    session: Session, node: Node, question: str, retry: str, max_tokens: int
) -> Node | None:
    """The model's own critique of an attempt."""
    child = _child(session, node, "critique")
    if child is None:
        return None
    session.force(child, question, special=True)
    await session.grow([child], max_tokens=max_tokens)
    if session.stopped_by or child.state == "pruned":
        return None
    if retry:
        follower = session.follow(child, "critique")
        session.force(follower, retry, special=True)
        return follower
    return child
