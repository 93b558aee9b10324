"""Self-consistency: sample many answers, and let them vote."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

from cotrt.errors import InvalidRequestError
from cotrt.options.sampling import SamplingParams
from cotrt.program.branch import Branch
from cotrt.program.llm import LLM
from cotrt.search.budget import Budget
from cotrt.search.callbacks import call, check_int, check_one_of
from cotrt.search.events import OnEvent
from cotrt.search.result import SearchResult, Vote, VoteRow, VoteTable
from cotrt.search.scorers import mean_logprob
from cotrt.search.session import Extract, Session
from cotrt.search.stopping import is_decided, posterior_bar, stops_by_posterior
from cotrt.search.tree import Node

Weight = Literal["logprob"] | Callable[[Node], float] | None


class Ballot:
    """The votes so far: groups of equal answers, counted one by one.

    Args:
        equal: whether two answers are the same, sync or async; None compares with ``==``.
        early_stop, threshold, window: when the vote is decided; see `self_consistency`.
    """

    def __init__(
        self,
        *,
        equal: Callable[[Any, Any], Any] | None = None,
        early_stop: Literal["posterior", "window"] | None = None,
        threshold: float = 0.95,
        window: int = 5,
    ) -> None:
        self._equal = equal
        self._early_stop, self._threshold, self._window = early_stop, threshold, window
        self.votes: list[Vote] = []
        self.answers: list[Any] = []  # the first answer of each group
        self.weights: list[float] = []
        self.counts: list[int] = []
        self._sequence: list[int] = []  # groups of the counted votes, in order

    async def add(self, vote: Vote) -> None:
        """Take one more vote; it is counted if ``vote.counted``."""
        if vote.counted:
            vote.group = await self._group_of(vote.answer)
            if vote.group == len(self.answers):
                self.answers.append(vote.answer)
                self.weights.append(0.0)
                self.counts.append(0)
            self.weights[vote.group] += vote.weight
            self.counts[vote.group] += 1
            self._sequence.append(vote.group)
        self.votes.append(vote)

    async def _group_of(self, answer: Any) -> int:
        for group, other in enumerate(self.answers):
            same = answer == other if self._equal is None else self._equal(other, answer)
            if await call(lambda same=same: same):
                return group
        return len(self.answers)

    def leader(self) -> int | None:
        """The heaviest group; of equal ones the first seen."""
        if not self.answers:
            return None
        return max(range(len(self.answers)), key=lambda group: (self.weights[group], -group))

    def is_decided(self, num_votes: int) -> bool:
        """Whether the vote may stop, of `num_votes` in all.

        "posterior": P(the leader is likelier than the runner-up) is above the threshold, raised a
        little for looking after every vote (`cotrt.search.stopping.posterior_bar`), or what is
        left could not change the leader. "window": the last votes agree.
        """
        leader = self.leader()
        if self._early_stop is None or leader is None:
            return False
        if self._early_stop == "window":
            last = self._sequence[-self._window :]
            return len(last) == self._window and len(set(last)) == 1
        # Weights are scaled so that they sum to the number of votes.
        scale = sum(self.counts) / (sum(self.weights) or 1.0)
        lead = self.weights[leader] * scale
        second = max(
            (w * scale for group, w in enumerate(self.weights) if group != leader), default=0.0
        )
        # A vote to come weighs at most exp(0) = 1 where weights are probabilities.
        heaviest = scale * max(1.0, *(vote.weight for vote in self.votes))
        left = (num_votes - len(self.votes)) * heaviest
        if is_decided(lead, second, left):
            return True
        return stops_by_posterior(lead, second, num_votes, self._threshold)

    def table(self) -> VoteTable:
        rows = []
        for group, answer in enumerate(self.answers):
            own = [vote for vote in self.votes if vote.group == group]
            rows.append(
                VoteRow(
                    answer=answer,
                    votes=len(own),
                    weight=self.weights[group],
                    tokens=sum(vote.tokens for vote in own),
                    node_ids=[vote.node_id for vote in own],
                )
            )
        order = sorted(range(len(rows)), key=lambda group: (-rows[group].weight, group))
        place = {group: index for index, group in enumerate(order)}
        for vote in self.votes:
            vote.group = None if vote.group is None else place[vote.group]
        return VoteTable(votes=self.votes, rows=[rows[group] for group in order])


async def self_consistency(
    root: Branch | LLM,
    prompt: Any = None,
    *,
    n: int = 16,
    extract: Extract = "answer",
    equal: Callable[[Any, Any], Any] | None = None,
    weight: Weight = None,
    early_stop: Literal["posterior", "window"] | None = "posterior",
    threshold: float = 0.95,
    window: int = 5,
    count_truncated: bool = False,
    params: SamplingParams | None = None,
    budget: Budget | None = None,
    on_event: OnEvent | None = None,
    every: int = 16,
) -> SearchResult:
    r"""`n` samples vote; the samples still running when the vote is decided are pruned.

    Votes are counted in the order of the samples' lengths, which is the order in which they end.

    Args:
        root: a branch, left unchanged, or an LLM.
        prompt: for an LLM: text, token ids or messages.
        n: samples at most.
        extract: "answer" (the last ``\boxed{}``, else the last number), "boxed", "number", a
            compiled regular expression, or ``text -> hashable or None``, sync or async.
        equal: ``equal(a, b)``: whether two answers are the same; default ``==``.
        weight: None: a vote counts 1; "logprob": the exponential of the sample's mean
            log-probability; or ``weight(node) -> float``, sync.
        early_stop: "posterior": the posterior that the leader is likelier than the runner-up is
            above `threshold`; a stopped vote then differs from the full one in at most
            ``1 - threshold`` of cases. "window": the last `window` votes agree. None: never.
        threshold: above 0.5 and below 1.
        window: at least 1.
        count_truncated: samples that a limit cut vote too. Else they are in the table, not counted.
        params, budget, on_event: as in every search.
        every: tokens between two looks at what has finished, with an early stop.

    Returns:
        ``.votes`` is the table, ``.answer`` the leading answer, ``.best`` the likeliest sample
        that voted for it.

    Raises:
        InvalidRequestError: an argument that is wrong, or a weight that is no finite number.
    """
    check_int("n", n, 1)
    check_int("window", window, 1)
    check_int("every", every, 1)
    check_one_of("early_stop", early_stop, ("posterior", "window", None))
    if not 0.5 < threshold < 1:
        raise InvalidRequestError(f"threshold={threshold!r}: must be above 0.5 and below 1")
    weigh = _weigher(weight)
    session = Session(
        "self_consistency",
        root,
        prompt,
        params=params,
        budget=budget,
        on_event=on_event,
        extract=extract,
    )
    ballot = Ballot(equal=equal, early_stop=early_stop, threshold=threshold, window=window)
    if early_stop == "posterior":
        posterior_bar(n, threshold)  # computed once, here and not between two tokens
    async with session:
        growths = session.begin(session.fork(session.root, n))
        voted: set[int] = set()
        decided = False
        while len(voted) < len(growths) and not decided:
            await session.advance(growths, None if early_stop is None else every)
            ended = [g for g in growths if g.done and g.node.id not in voted]
            ended.sort(key=lambda growth: (growth.sampled, growth.node.id))
            await session.extract([growth.node for growth in ended])
            for growth in ended:
                voted.add(growth.node.id)
                session.let_go(growth.node)
                vote = _vote(growth.node, weigh, count_truncated, decided)
                await ballot.add(vote)
                decided = decided or ballot.is_decided(len(growths))
        if len(voted) < len(growths):
            session.stop("decided")
            running = [growth.node for growth in growths if growth.node.id not in voted]
            session.prune(running, "the vote was decided")
    voters = [session.tree.nodes[vote.node_id] for vote in ballot.votes]
    leader = ballot.leader()
    best = None
    if leader is None and voters:
        cut = sum(not node.is_finished for node in voters)
        session.tree.root.note = (
            f"no answer: none of {len(voters)} samples voted, {cut} of them were cut by a limit"
        )
    if leader is not None:
        own = [session.tree.nodes[v.node_id] for v in ballot.votes if v.group == leader]
        best = max(own, key=lambda node: (node.is_finished, mean_logprob(node), -node.id))
    return await session.finish(
        voters or None,
        best=best,
        votes=ballot.table(),
        answer=None if leader is None else ballot.answers[leader],
    )


def _weigher(weight: Weight) -> Callable[[Node], float]:
    if weight is None:
        return lambda node: 1.0
    if weight == "logprob":
        return lambda node: math.exp(mean_logprob(node))
    if not callable(weight):
        raise InvalidRequestError(f'weight={weight!r}: must be None, "logprob" or a function')
    given = weight

    def checked(node: Node) -> float:
        value = float(given(node))
        if not (math.isfinite(value) and value >= 0):
            raise InvalidRequestError(
                f"weight gave {value} for node {node.id}: must be a finite number, 0 or more"
            )
        return value

    return checked


def _vote(node: Node, weigh: Callable[[Node], float], count_truncated: bool, decided: bool) -> Vote:
    counts = node.answer is not None and node.state != "pruned" and not decided
    return Vote(
        node_id=node.id,
        answer=node.answer,
        group=None,
        weight=weigh(node) if node.token_ids else 0.0,
        tokens=node.num_sampled,
        finished=node.is_finished,
        counted=counts and (node.is_finished or count_truncated),
    )


def vote_of(answers: Sequence[tuple[Node, float]]) -> Any:
    """The answer with the greatest sum of weights among ``(node, weight)``; None without one."""
    sums: dict[Any, float] = {}
    for node, weight in answers:
        if node.answer is not None:
            sums[node.answer] = sums.get(node.answer, 0.0) + weight
    return max(sums, key=lambda answer: sums[answer]) if sums else None
