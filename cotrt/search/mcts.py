"""Monte Carlo tree search over steps, with rollouts that run together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from cotrt.errors import InvalidRequestError
from cotrt.options.sampling import SamplingParams
from cotrt.program.branch import Branch
from cotrt.program.llm import LLM
from cotrt.search.budget import Budget
from cotrt.search.callbacks import check_int, check_one_of
from cotrt.search.events import OnEvent
from cotrt.search.result import SearchResult
from cotrt.search.scorers import Scorer
from cotrt.search.self_consistency import vote_of
from cotrt.search.session import Extract, Session, ranking
from cotrt.search.steps import check_step_options
from cotrt.search.tree import Node


@dataclass
class _Stats:
    """What is known of a node: rollouts through it, their rewards, those on their way."""

    visits: int = 0
    total: float = 0.0
    virtual: int = 0


class _Tree:
    """The part of the search tree that UCT walks on.

    Args:
        c: weight of exploration.
        branching: children of a node at most.
        depth: steps of a path at most; rollouts go on from there.
    """

    def __init__(self, root: Node, *, c: float, branching: int, depth: int) -> None:
        self.root = root
        self.stats: dict[int, _Stats] = {root.id: _Stats()}
        self.children: dict[int, list[Node]] = {root.id: []}
        self._c, self._branching, self._depth = c, branching, depth
        self._low, self._high = math.inf, -math.inf

    def add(self, parent: Node, child: Node) -> None:
        self.stats[child.id] = _Stats()
        self.children[child.id] = []
        self.children[parent.id].append(child)

    def select(self, pending: set[int]) -> Node:
        """The node from which the next rollout starts, with a virtual loss on its path.

        Args:
            pending: new children that have not grown yet; the walk ends at one of them.
        """
        node = self.root
        self.stats[node.id].virtual += 1
        while self.children[node.id] and not self.can_expand(node, pending):
            parent = self.stats[node.id]
            spread = math.log(parent.visits + parent.virtual)
            node = max(self.children[node.id], key=lambda child: self._uct(child, spread))
            self.stats[node.id].virtual += 1
        return node

    def can_expand(self, node: Node, pending: set[int]) -> bool:
        """Whether the node may have one more child now."""
        return (
            node.state == "kept"
            and node.id not in pending
            and node.depth < self._depth
            and len(self.children[node.id]) < self._branching
        )

    def _uct(self, child: Node, spread: float) -> tuple[float, int]:
        stats = self.stats[child.id]
        tries = stats.visits + stats.virtual
        if tries == 0:
            return math.inf, -child.id
        # Rewards are scaled to 0..1; a rollout on its way counts as the worst.
        span = self._high - self._low
        won = (stats.total - stats.visits * self._low) / span if span > 0 else stats.visits / 2
        return won / tries + self._c * math.sqrt(spread / tries), -child.id

    def reward(self, node: Node, reward: float) -> None:
        """A rollout through `node` ended with `reward`: its virtual loss is taken back."""
        self._low, self._high = min(self._low, reward), max(self._high, reward)
        for each in (self.root, *node.path):
            stats = self.stats[each.id]
            stats.virtual -= 1
            stats.visits += 1
            stats.total += reward
            each.visits = stats.visits
            each.value = stats.total / stats.visits

    def forget(self, node: Node) -> None:
        """A rollout through `node` came to nothing: its virtual loss is taken back."""
        for each in (self.root, *node.path):
            self.stats[each.id].virtual -= 1

    def drop(self, node: Node) -> None:
        """Nothing grew in `node`: it is no child of the walk any more."""
        assert node.parent is not None
        siblings = self.children[node.parent]
        siblings[:] = [each for each in siblings if each is not node]

    def best_leaf(self, choose_by: str) -> Node:
        """From the root down, the child with the most visits or the best value."""
        node = self.root
        while tried := [n for n in self.children[node.id] if self.stats[n.id].visits]:
            if choose_by == "visits":
                node = max(tried, key=lambda n: (n.visits, n.value or 0.0, -n.id))
            else:
                node = max(tried, key=lambda n: (n.value or 0.0, n.visits, -n.id))
        return node


async def mcts(
    root: Branch | LLM,
    prompt: Any = None,
    *,
    score: Scorer | LLM | None = None,
    rollouts: int = 32,
    parallel: int = 8,
    branching: int = 4,
    depth: int = 8,
    c: float = 1.4,
    choose_by: Literal["visits", "value", "vote"] = "visits",
    delimiter: str = "\n\n",
    rollout_tokens: int | None = None,
    params: SamplingParams | None = None,
    budget: Budget | None = None,
    on_event: OnEvent | None = None,
    extract: Extract | None = None,
) -> SearchResult:
    r"""UCT: select, expand by one step, roll out to the end, score, and tell the path.

    `parallel` rollouts are selected one after the other, each with a virtual loss on its path, and
    then run as one batch.

    Args:
        root: a branch, left unchanged, or an LLM.
        prompt: for an LLM: text, token ids or messages.
        score: the reward: ``score(node) -> float`` of a whole path (a rollout's end, or a step
            that finished), sync or async, or an LLM that judges; default: the mean
            log-probability of the path.
        rollouts: in all.
        parallel: in one wave.
        branching: children of a node at most.
        depth: steps of a path at most; from there on it is only rolled out.
        c: weight of exploration; rewards are scaled to 0..1 by the least and greatest seen.
        choose_by: the winner is the best rollout below the path of most "visits" or of best
            "value"; "vote": the best of those whose answers have the greatest sum of rewards,
            which needs `extract`.
        delimiter: ends a step; it is part of the step's text.
        rollout_tokens: of one rollout at most; None: as `params` say.
        params: ``max_tokens`` is for one step; ``stop`` ends the whole answer.
        budget, on_event, extract: as in every search.

    Returns:
        The rollouts' ends and finished steps are the candidates. ``node.visits`` and
        ``node.value`` are the rollouts through a node and their mean reward.

    Raises:
        InvalidRequestError: an argument that is wrong, or a reward that is no finite number.
    """
    options = (("rollouts", rollouts), ("parallel", parallel), ("branching", branching))
    for name, value in (*options, ("depth", depth)):
        check_int(name, value, 1)
    check_one_of("choose_by", choose_by, ("visits", "value", "vote"))
    check_step_options("last", delimiter, depth)
    if choose_by == "vote" and extract is None:
        raise InvalidRequestError('choose_by="vote" needs extract=')
    session = Session(
        "mcts",
        root,
        prompt,
        params=params,
        budget=budget,
        on_event=on_event,
        extract=extract,
    )
    scorer = session.scorer(score)
    limit: dict[str, Any] = {} if rollout_tokens is None else {"max_tokens": rollout_tokens}
    ends: list[Node] = []
    tree: _Tree | None = None
    async with session:
        tree = _Tree(session.root, c=c, branching=branching, depth=depth)
        num_done = 0
        while num_done < rollouts and not session.stopped_by:
            count = min(parallel, rollouts - num_done)
            num_done += count
            starts = await _expand(session, tree, count, delimiter)
            if session.stopped_by == "max_tokens":
                break
            runs: list[tuple[Node, Node]] = []
            for start in starts:
                # A start that has finished by itself is its own end, scored once.
                ends_here = [start] if start.is_finished else session.fork(start, 1, "rollout")
                runs.extend((start, end) for end in ends_here)
            await session.grow([end for start, end in runs if end is not start], **limit)
            fresh = {end.id: end for _, end in runs if end.score is None}
            await session.score(list(fresh.values()), scorer)
            await session.extract([end for end in fresh.values() if end.score is not None])
            for start, end in runs:
                if end.score is None:  # cut before its first token, or failed
                    tree.forget(start)
                    continue
                tree.reward(start, end.score)
                if end is not start:
                    end.value, end.visits = end.score, 1
                if end.id in fresh:
                    ends.append(end)
                session.let_go(end)
    best = _winner(tree, ends, choose_by) if tree is not None else None
    return await session.finish(ends or None, best=best)


async def _expand(session: Session, tree: _Tree, count: int, delimiter: str) -> list[Node]:
    """Select `count` starts and grow the new ones among them, in one wave."""
    pending: set[int] = set()
    picks: list[Node] = []
    for _ in range(count):
        node = tree.select(pending)
        if tree.can_expand(node, pending):
            children = session.fork(node, 1)
            if not children:
                tree.forget(node)
                break
            [child] = children
            tree.add(node, child)
            tree.stats[child.id].virtual += 1
            pending.add(child.id)
            node = child
        picks.append(node)
    await session.grow([session.tree.nodes[i] for i in sorted(pending)], delimiter=delimiter)
    starts = []
    for node in picks:
        if node.state != "pruned" and node.token_ids:
            starts.append(node)
        else:
            tree.forget(node)
            tree.drop(node)
    return starts


def _winner(tree: _Tree, ends: list[Node], choose_by: str) -> Node | None:
    """The best end below the chosen path, finished ones first; of all ends where it has none."""
    if choose_by == "vote":
        finished = [end for end in ends if end.is_finished]
        low = min((end.score or 0.0 for end in finished), default=0.0)
        votes = [(end, (end.score or 0.0) - min(low, 0.0)) for end in finished]
        answer = vote_of(votes)
        voters = [end for end in finished if end.answer is not None and end.answer == answer]
        return ranking(voters or ends)[0] if ends else None
    node: Node | None = tree.best_leaf(choose_by)
    while node is not None:
        at = node.id
        below = [end for end in ends if at == 0 or any(each.id == at for each in end.path)]
        if any(end.is_finished for end in below):
            return ranking(below)[0]
        node = None if node.parent is None else node.tree.nodes[node.parent]
    return ranking(ends)[0] if ends else None
