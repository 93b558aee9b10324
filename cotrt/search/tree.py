"""The tree that a search grew, as data: nodes that know their parent, and how each ended."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, PrivateAttr, computed_field

from cotrt.errors import InvalidRequestError

if TYPE_CHECKING:
    from cotrt.program.branch import Branch

State = Literal["kept", "pruned", "finished", "cut"]


def _as_json(value: Any) -> Any:
    """Answers may be any hashable: what JSON has no form for is written as its text."""
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_as_json(item) for item in value]
    return str(value)


Answer = Annotated[Any, PlainSerializer(_as_json, when_used="json")]


class Node(BaseModel):
    """A piece of reasoning: the tokens that one branch added to its parent's.

    Attributes:
        id: its index in ``tree.nodes``; 0 is the root, the prompt.
        parent: the parent's id; None for the root.
        depth: nodes between it and the root.
        kind: "root", "step" (a part of an answer), "rollout", "probe", "critique", "proposal",
            "observation", or "kept" (the beginning of another node, gone on from).
        text: the text of its tokens, separators included, special tokens left out; the texts of a
            path, one after the other, are the path's text. An incomplete character at its end
            belongs to its children.
        token_ids: its tokens, forced and sampled.
        token_texts: one a token, special tokens included; "" inside a character of several.
        logprobs: one a token; None where it was forced.
        score: what the scorer gave, or None.
        value: what the search ranks it by: the aggregate of the scores on its path, or its mean
            reward in mcts; None where nothing was scored.
        visits: rollouts through it (mcts), or how many equal ones were merged into it.
        state: "kept" (still in the running when the search ended), "pruned", "finished" (ended by
            an end-of-sequence token or by a stop of the params; no other one is a whole answer),
            "cut" (the budget, the deadline or a cancelled scope ended it).
        finish_reason, stop_reason: of its generation, as in `cotrt.CompletionOutput`.
        answer: what was extracted from the path that ends here, or None.
        copied_from: the node whose first tokens these are: they were sampled there, once.
        note: why it was pruned or cut, or what else there is to say.
        kv_shared_blocks, kv_private_blocks: blocks of its branch's path that others held too, and
            that it held alone, when it had grown.
    """

    model_config = ConfigDict(extra="ignore")

    id: int
    parent: int | None = None
    depth: int = 0
    kind: str = "step"
    text: str = ""
    token_ids: list[int] = Field(default_factory=list)
    token_texts: list[str] = Field(default_factory=list)
    logprobs: list[float | None] = Field(default_factory=list)
    score: float | None = None
    value: float | None = None
    visits: int = 0
    state: State = "kept"
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    answer: Answer = None
    copied_from: int | None = None
    note: str = ""
    kv_shared_blocks: int = 0
    kv_private_blocks: int = 0

    _tree: SearchTree | None = PrivateAttr(None)
    _branch: Branch | None = PrivateAttr(None)
    _start: int = PrivateAttr(0)  # length of the branch where this node begins
    _open_end: str = PrivateAttr("")  # what an incomplete character at its end shows, if it stays

    def __repr__(self) -> str:
        return f"<Node {self.id} ({self.kind}, {self.state}): {self.text!r}>"

    def __eq__(self, other: object) -> bool:
        # Fields alone: its tree and its branch are not part of its value.
        return isinstance(other, Node) and self.__dict__ == other.__dict__

    @computed_field  # type: ignore[prop-decorator]
    @property
    def logprob(self) -> float:
        """Sum of the sampled tokens' log-probabilities."""
        return sum(x for x in self.logprobs if x is not None)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def num_sampled(self) -> int:
        """Tokens sampled here; the others were forced, or are a copy of another node's."""
        if self.copied_from is not None:
            return 0
        return sum(x is not None for x in self.logprobs)

    @property
    def num_tokens(self) -> int:
        """Its tokens, forced and sampled."""
        return len(self.token_ids)

    @property
    def is_finished(self) -> bool:
        """Its path is a whole answer."""
        return self.state == "finished"

    @property
    def tree(self) -> SearchTree:
        """The tree that it is in."""
        assert self._tree is not None, f"node {self.id} is in no tree"
        return self._tree

    @property
    def path(self) -> list[Node]:
        """The nodes from below the root to this one."""
        return self.tree.path(self.id)

    @property
    def path_text(self) -> str:
        """The text from the prompt's end to this node's."""
        return "".join(node.text for node in self.path)

    @property
    def prompt(self) -> str:
        """The prompt's text."""
        return self.tree.nodes[0].text

    @property
    def branch(self) -> Branch:
        """The living branch that ends here, for scorers: score, fork or choose on it.

        Raises:
            InvalidRequestError: the search is over, or this node's branch was let go.
        """
        if self._branch is None:
            raise InvalidRequestError(
                f"node {self.id} has no branch: it was let go, or the search is over; its tokens "
                "are in node.token_ids"
            )
        return self._branch


class Candidate(BaseModel):
    """A whole path of a tree, as an answer.

    Attributes:
        node_id: the node that it ends in.
        text, token_ids, logprobs: of the path, from the prompt's end on.
        logprob: sum of the sampled tokens' log-probabilities.
        score: what it was ranked by; None where nothing was scored.
        answer: what was extracted from its text, or None.
        finished: it is a whole answer, not cut by a limit.
        finish_reason, stop_reason: of its last generation.
    """

    node_id: int
    text: str
    token_ids: list[int]
    logprobs: list[float | None]
    logprob: float
    score: float | None
    answer: Answer
    finished: bool
    finish_reason: str | None
    stop_reason: int | str | None

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of the sampled tokens; 0.0 where none was sampled."""
        sampled = [x for x in self.logprobs if x is not None]
        return sum(sampled) / len(sampled) if sampled else 0.0


class SearchTree(BaseModel):
    """Every node that a search grew, the winner's path marked by `best_id`.

    ``print(tree)`` shows it; ``tree.model_dump_json()`` and ``SearchTree.model_validate_json``
    write and read it; `cotrt.viewer.save_html` draws it.

    Attributes:
        algorithm: the search's name.
        nodes: node i has id i; parents come before their children.
        best_id: the node that the winning path ends in, or None.
    """

    model_config = ConfigDict(extra="ignore")

    algorithm: str = "search"
    nodes: list[Node] = Field(default_factory=list)
    best_id: int | None = None

    def model_post_init(self, context: Any, /) -> None:
        for index, node in enumerate(self.nodes):
            if node.id != index or (node.parent is None) != (index == 0):
                raise ValueError(f"node {index} has id {node.id} and parent {node.parent}")
            if node.parent is not None and not 0 <= node.parent < index:
                raise ValueError(f"node {index} has parent {node.parent}, which is not before it")
            node._tree = self

    @property
    def root(self) -> Node:
        """The prompt."""
        return self.nodes[0]

    def add(self, parent: Node, kind: str) -> Node:
        """A new child of `parent`."""
        node = Node(id=len(self.nodes), parent=parent.id, depth=parent.depth + 1, kind=kind)
        node._tree = self
        self.nodes.append(node)
        return node

    def path(self, node_id: int) -> list[Node]:
        """Nodes from below the root to the given one."""
        found: list[Node] = []
        at = self.nodes[node_id]
        while at.parent is not None:
            found.append(at)
            at = self.nodes[at.parent]
        return found[::-1]

    def children(self, node_id: int) -> list[Node]:
        """The children of a node, in the order of their making."""
        return [node for node in self.nodes if node.parent == node_id]

    def leaves(self) -> Iterator[Node]:
        """The nodes without children."""
        parents = {node.parent for node in self.nodes}
        return (node for node in self.nodes if node.id not in parents)

    def candidate(self, node_id: int) -> Candidate:
        """The path to a node, as an answer."""
        node, path = self.nodes[node_id], self.path(node_id)
        return Candidate(
            node_id=node_id,
            text="".join(each.text for each in path),
            token_ids=[token for each in path for token in each.token_ids],
            logprobs=[x for each in path for x in each.logprobs],
            logprob=sum(each.logprob for each in path),
            score=node.score if node.value is None else node.value,
            answer=node.answer,
            finished=node.is_finished,
            finish_reason=node.finish_reason,
            stop_reason=node.stop_reason,
        )

    def render(self, *, width: int = 100, max_nodes: int | None = None) -> str:
        """Plain text: a line a node, the winner's path marked with ``*``.

        Args:
            width: columns of a line at most.
            max_nodes: nodes shown at most; the rest is counted in a last line.
        """
        from cotrt.search.render import render

        return render(self, width=width, max_nodes=max_nodes)

    def __str__(self) -> str:
        return self.render()

    def __repr__(self) -> str:
        return f"<SearchTree of {self.algorithm}: {len(self.nodes)} nodes, best {self.best_id}>"
