"""Scores of nodes: log-probability, a question to the model, a second model as judge."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal

from cotrt.program.branch import Branch
from cotrt.program.llm import LLM
from cotrt.search.tree import Node

Scorer = Callable[[Node], Any]
Aggregate = Literal["last", "min", "prod", "mean"]
AGGREGATES = ("last", "min", "prod", "mean")

# What an LLM that is given as the scorer is asked.
JUDGE_QUESTION = "\nIs the answer above correct? Answer Yes or No:"


def mean_logprob(node: Node) -> float:
    """Mean log-probability of the sampled tokens from the prompt's end to this node's."""
    total, count = 0.0, 0
    for each in node.path:
        total += each.logprob
        count += sum(x is not None for x in each.logprobs)
    return total / count if count else 0.0


def ask(question: str, *, yes: str = " Yes", no: str = " No") -> Callable[[Node], Awaitable[float]]:
    """A scorer that asks the model itself: P(yes) / (P(yes) + P(no)) after the question.

    Both answers of all nodes of a wave are computed in one batch over the shared tree; the branch
    is unchanged.

    Args:
        question: forced after the node's text, and not scored.
        yes, no: the two answers, each with the space before it.
    """

    async def score(node: Node) -> float:
        first, second = await node.branch.score([yes, no], given=question)
        return 1 / (1 + math.exp(min(700.0, second.total - first.total)))

    return score


class Judge:
    """A scorer that asks a second model, as a context manager.

    The judge reads the instructions, the prompt and then each node's text once: its branches are
    forked along the search's tree, so that no text is sent twice.

    Args:
        llm: the judge.
        instructions: before the search's prompt.
        question: after the node's text.
        yes, no: the two answers.
    """

    def __init__(
        self,
        llm: LLM,
        question: str,
        *,
        instructions: str = "",
        yes: str = " Yes",
        no: str = " No",
    ) -> None:
        self._llm = llm
        self._question, self._instructions = question, instructions
        self._yes, self._no = yes, no
        self._root: Branch | None = None
        self._of_node: dict[tuple[int, int], Branch] = {}

    async def __call__(self, node: Node) -> float:
        """P(yes) / (P(yes) + P(no)) of the path that ends here."""
        branch = self._branch_of(node)
        yes, no = await branch.score([self._yes, self._no], given=self._question)
        return 1 / (1 + math.exp(min(700.0, no.total - yes.total)))

    def _branch_of(self, node: Node) -> Branch:
        if self._root is None:
            self._root = self._llm.branch(self._instructions)
        at, tree = self._root, id(node.tree)
        for each in [node.tree.root, *node.path]:
            key = (tree, each.id)
            if key not in self._of_node:
                child = at.fork(1)[0]
                self._of_node[key] = child.extend(each.text, special=False)
            at = self._of_node[key]
        return at

    def close(self) -> None:
        """Prune the judge's branches. Idempotent."""
        if self._root is not None:
            self._root.prune()
        self._root = None
        self._of_node.clear()

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def aggregate(scores: Sequence[float], how: Aggregate) -> float:
    """The value of a path of step scores."""
    if how == "last":
        return scores[-1]
    if how == "min":
        return min(scores)
    if how == "prod":
        return math.prod(scores)
    return sum(scores) / len(scores)


def path_value(node: Node, how: Aggregate) -> float | None:
    """The aggregate of the scores on a node's path; None where it has none."""
    scores = [each.score for each in node.path if each.score is not None]
    return aggregate(scores, how) if scores else None
