"""What a search returns."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from cotrt.search.tree import Answer, Candidate, SearchTree

StopReason = Literal[
    "completed",
    "decided",
    "accepted",
    "agreed",
    "max_steps",
    "max_tokens",
    "max_branches",
    "deadline",
    "cancelled",
]


class Usage(BaseModel):
    """What a search cost.

    Attributes:
        tokens_generated: tokens that the search sampled, those of probes, rollouts and pruned
            branches included: the sum of ``num_sampled`` over the tree's nodes.
        prompt_tokens_computed: given tokens (the prompt, forced text, scored text) whose KV was
            computed.
        prompt_tokens_reused: tokens whose KV was there, counted once for each generate or score.
        branches: branches forked to sample from.
        wall_time_s: seconds.
        exact: nothing else sampled on the engine meanwhile. The two counts of prompt tokens are
            the engine's own over the time of the search, so that with other work beside it they
            hold that work's as well.
    """

    model_config = ConfigDict(extra="ignore")

    tokens_generated: int = 0
    prompt_tokens_computed: int = 0
    prompt_tokens_reused: int = 0
    branches: int = 0
    wall_time_s: float = 0.0
    exact: bool = True


class Vote(BaseModel):
    """One sample's vote.

    Attributes:
        node_id: the sample.
        answer: what was extracted, or None.
        group: index of its answer in the table's rows; None where it does not count.
        weight: 1.0, or the exponential of its mean log-probability.
        tokens: sampled tokens that the vote cost.
        finished: False for a sample that a limit cut.
        counted: it had an answer, was finished (or cut ones count), and came before the stop.
    """

    node_id: int
    answer: Answer
    group: int | None
    weight: float
    tokens: int
    finished: bool
    counted: bool


class VoteRow(BaseModel):
    """The votes for one answer.

    Attributes:
        answer: the first of the equal answers.
        votes: how many.
        weight: the sum of their weights.
        tokens: what they cost.
        node_ids: the samples.
    """

    answer: Answer
    votes: int
    weight: float
    tokens: int
    node_ids: list[int]


class VoteTable(BaseModel):
    """A vote: every sample, and a row an answer, the heaviest first (ties: the first seen)."""

    votes: list[Vote] = Field(default_factory=list)
    rows: list[VoteRow] = Field(default_factory=list)

    def __str__(self) -> str:
        lines = [
            f"{row.votes:4} x {row.answer}   weight {row.weight:.3f}, {row.tokens} tokens"
            for row in self.rows
        ]
        idle = [vote for vote in self.votes if not vote.counted]
        if idle:
            lines.append(f"{len(idle):4} not counted, {sum(v.tokens for v in idle)} tokens")
        return "\n".join(lines) or "no votes"


class SearchResult(BaseModel):
    """What a search found, what it did, and what that cost; to JSON and back by pydantic.

    Attributes:
        algorithm: the search's name.
        tree: every node, pruned ones included.
        best_id, candidate_ids: the nodes in which the winner and the candidates end.
        answer: the winner's extracted answer; without an extractor its text; None without winner,
            and of a vote in which nobody voted.
        usage: the cost.
        stopped_by: "completed" (nothing was left to do), "decided" (the vote), "accepted" (a
            score reached ``accept``, or ``done`` said so), "agreed" (the probes), "max_steps"
            (depth, steps, attempts or turns), or the budget's "max_tokens", "max_branches",
            "deadline", or "cancelled".
        votes: the table of a vote, or None.
    """

    model_config = ConfigDict(extra="ignore")

    algorithm: str
    tree: SearchTree
    best_id: int | None = None
    candidate_ids: list[int] = Field(default_factory=list)
    answer: Answer = None
    usage: Usage = Field(default_factory=Usage)
    stopped_by: StopReason = "completed"
    votes: VoteTable | None = None

    @model_validator(mode="after")
    def _ids_are_there(self) -> SearchResult:
        ids = [*self.candidate_ids, *([] if self.best_id is None else [self.best_id])]
        if any(not 0 <= i < len(self.tree.nodes) for i in ids):
            raise ValueError(f"best_id or candidate_ids name nodes that are not there: {ids}")
        return self

    def __repr__(self) -> str:
        return (
            f"<SearchResult of {self.algorithm}: answer {self.answer!r}, stopped by "
            f"{self.stopped_by}, {len(self.tree.nodes)} nodes, {self.usage!r}>"
        )

    @property
    def best(self) -> Candidate | None:
        """The winner; None where nothing was grown."""
        return None if self.best_id is None else self.tree.candidate(self.best_id)

    @property
    def candidates(self) -> list[Candidate]:
        """All paths that could win, best first: the finished before those that a limit cut."""
        return [self.tree.candidate(i) for i in self.candidate_ids]

    @property
    def text(self) -> str:
        """The winner's text; "" without one."""
        return "" if self.best is None else self.best.text
