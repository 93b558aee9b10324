"""What all searches share: one run over a root, its tree, its budget, and its end."""

from __future__ import annotations

import inspect
import logging
import math
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import anyio

from cotrt.errors import InvalidRequestError
from cotrt.options.sampling import SamplingParams
from cotrt.program.branch import Branch
from cotrt.program.llm import LLM
from cotrt.sampling.detokenizer import NUM_CONTEXT_IDS, text_after
from cotrt.sampling.seeds import normalize_seed, output_seed
from cotrt.search.access import counters_of, default_params, tokenizer_of
from cotrt.search.answers import Extractor, as_extractor, check_answer
from cotrt.search.budget import Budget
from cotrt.search.callbacks import as_score, call_each
from cotrt.search.events import Kind, Listener, OnEvent
from cotrt.search.node_text import shown_text, token_texts
from cotrt.search.result import SearchResult, StopReason, Usage, VoteTable
from cotrt.search.scorers import JUDGE_QUESTION, Judge, Scorer, ask, mean_logprob
from cotrt.search.tree import Node, SearchTree, State
from cotrt.search.wave import Growth, advance

logger = logging.getLogger(__name__)

# The answer of a search that names none of its own.
_WINNERS: Any = object()

Extract = Any  # a name, a compiled pattern or a function; see `answers.as_extractor`


class Session:
    """One run of one search: an async context manager around its body.

    Inside, the search forks nodes, grows them in waves, scores and prunes them. Leaving it prunes
    everything that it grew, at once and without a wait, however it is left; the root is as it was.
    The end of the budget's time and a cancelled anyio or trio scope leave the body quietly, and
    `finish` makes a result of what is there; a plain ``asyncio.Task.cancel()`` goes on as the
    CancelledError that asyncio wants to see.

    Laws: the sum of ``num_sampled`` over the tree is what was sampled; a pruned node has no living
    branch; after the end no node has one.

    Args:
        algorithm: the search's name.
        root: a `Branch`, which is left unchanged, or an `LLM`.
        prompt: for an LLM: text, token ids or messages.
        params: of every generate; default: the model's.
        budget: what may be spent.
        on_event: told of everything that happens, sync or async.
        extract: of answers, or None.
        in_place: the root itself grows, and stays; the search begins with ``follow(root)``.

    Attributes:
        tree: what has grown so far.
        root: node 0, the prompt.
        budget: never None.
        params: never None.
        stopped_by: why it ended before its natural end, or None.
    """

    def __init__(
        self,
        algorithm: str,
        root: Branch | LLM,
        prompt: Any,
        *,
        params: SamplingParams | None,
        budget: Budget | None,
        on_event: OnEvent | None,
        extract: Extract | None = None,
        in_place: bool = False,
    ) -> None:
        if in_place and not isinstance(root, Branch):
            raise InvalidRequestError("in_place=True needs a Branch to grow")
        if isinstance(root, Branch):
            if prompt is not None:
                raise InvalidRequestError(
                    f"{algorithm} on a branch takes no prompt: extend a fork of the branch instead"
                )
        elif not isinstance(root, LLM):
            raise InvalidRequestError(f"root must be a Branch or an LLM, not {type(root).__name__}")
        elif prompt is None:
            raise InvalidRequestError(f"{algorithm} on an LLM needs a prompt")
        if params is not None and not isinstance(params, SamplingParams):
            raise InvalidRequestError(f"params must be a SamplingParams, not {params!r}")
        if params is not None and params.n != 1:
            raise InvalidRequestError(f"n={params.n} in a search's params: it forks by itself")
        if budget is not None and not isinstance(budget, Budget):
            raise InvalidRequestError(f"budget must be a Budget, not {budget!r}")
        self._given_root, self._prompt = root, prompt
        self._given_params, self._in_place = params, in_place
        self._listener = Listener(on_event, algorithm)
        self._extractor: Extractor | None = None if extract is None else as_extractor(extract)
        self.budget = Budget() if budget is None else budget
        self.tree = SearchTree(algorithm=algorithm)
        self.stopped_by: StopReason | None = None
        self._trunk: Branch | None = None
        self._extracted: set[int] = set()
        self._num_branches = 0
        self._judge: Judge | None = None

    # ---- life ---------------------------------------------------------------------------------

    async def __aenter__(self) -> Session:
        self._started = time.monotonic()
        self._listener.start()
        self.budget.start()
        left = self.budget.seconds_left
        given = self._given_root
        if isinstance(given, Branch):
            self._trunk = given if self._in_place else given.fork(1)[0]
        else:
            self._trunk = given.branch(self._prompt)
        try:
            self.params = self._given_params or default_params(self._trunk)
            self._tokenizer = tokenizer_of(self._trunk)
            self._counters = counters_of(self._trunk)
            ids = self._trunk.token_ids
            text = "" if self._tokenizer is None else text_after(self._tokenizer, ids)
            texts = token_texts(self._tokenizer, ids)
            root = Node(id=0, kind="root", text=text, token_ids=ids, token_texts=texts)
            root.logprobs = [None] * len(ids)
            root._tree, root._branch = self.tree, self._trunk
            self.tree.nodes.append(root)
            self._emit("start", None, {"prompt": root.text, "prompt_tokens": len(ids)})
            await self.flush()
        except BaseException:
            self._release_all()
            raise
        deadline = math.inf if left is None else anyio.current_time() + left
        self._scope = anyio.CancelScope(deadline=deadline)
        self._scope.__enter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        at_deadline = self._scope.__exit__(kind, error, trace)
        self._release_all()
        if error is None:
            return False
        if at_deadline:
            self.stop("deadline")
            return True
        if isinstance(error, anyio.get_cancelled_exc_class()) and _in_cancelled_scope():
            self.stop("cancelled")
            return True
        self._listener.forget()
        return False

    def _release_all(self) -> None:
        if self._trunk is not None and not self._in_place:
            self._trunk.prune()
        if self._judge is not None:
            self._judge.close()
        for node in self.tree.nodes:
            node._branch = None
        if self.tree.nodes:
            # Read now: later work is not this search's.
            before, after = self._counters, counters_of(self._trunk)  # type: ignore[arg-type]
            spent = {name: after[name] - before[name] for name in before}
            sampled = sum(node.num_sampled for node in self.tree.nodes)
            self._usage = Usage(
                tokens_generated=sampled,
                prompt_tokens_computed=spent["prompt_tokens_computed"],
                prompt_tokens_reused=spent["prompt_tokens_reused"],
                branches=self._num_branches,
                wall_time_s=time.monotonic() - self._started,
                exact=spent["generated_tokens"] == sampled,
            )

    def stop(self, reason: StopReason) -> None:
        """The search ends before its natural end; the first reason stays."""
        if self.stopped_by is None:
            self.stopped_by = reason

    @property
    def root(self) -> Node:
        return self.tree.nodes[0]

    # ---- growing ------------------------------------------------------------------------------

    def fork(
        self, parent: Node, n: int, kind: str = "step", *, at: int | None = None
    ) -> list[Node]:
        """Up to `n` new children; fewer, and the search stops, where the budget has no branches.

        Args:
            at: absolute length to fork at, within the parent's own tokens.
        """
        granted = self.budget.take_branches(n)
        if granted < n:
            self.stop("max_branches")
        if granted == 0:
            return []
        self._num_branches += granted
        nodes = []
        for branch in parent.branch.fork(granted, at=at):
            node = self.tree.add(parent, kind)
            node._branch, node._start = branch, len(branch)
            nodes.append(node)
        return nodes

    def follow(self, parent: Node, kind: str = "step") -> Node:
        """A new child that goes on in the parent's own branch, which moves to it."""
        node = self.tree.add(parent, kind)
        node._branch, parent._branch = parent.branch, None
        node._start = len(node.branch)
        return node

    def copy(self, node: Node, num_tokens: int) -> Node | None:
        """A sibling that holds the first tokens of `node` and shares their KV; None: no budget."""
        if self.budget.take_branches(1) == 0:
            self.stop("max_branches")
            return None
        self._num_branches += 1
        assert node.parent is not None
        sibling = self.tree.add(self.tree.nodes[node.parent], "kept")
        sibling.copied_from = node.id
        sibling._start = node._start
        sibling._branch = node.branch.fork(1, at=node._start + num_tokens)[0]
        self._record(sibling)
        return sibling

    def force(self, node: Node, text: str | Sequence[int], *, special: bool = False) -> None:
        """Append given text to a node."""
        node.branch.extend(text, special=special)
        self._record(node)

    def begin(
        self, nodes: Sequence[Node], *, delimiter: str | None = None, **overrides: Any
    ) -> list[Growth]:
        """One generate on each node, not started.

        Args:
            delimiter: a stop string that ends a step, not an answer.
            **overrides: fields of the params to set on top.
        """
        base = self.params
        if delimiter is not None:
            overrides["stop"] = (*overrides.get("stop", base.stop), delimiter)
        if overrides:
            base = base.replace(**overrides)
        growths = []
        for node in nodes:
            params = base
            if base.seed is not None:
                params = base.replace(seed=output_seed(normalize_seed(base.seed), node.id - 1))
            limit = params.max_tokens if params.is_max_tokens_set else None
            growths.append(Growth(node, params, limit, delimiter))
        return growths

    async def advance(self, growths: Sequence[Growth], every: int | None = None) -> None:
        """Grow all to their ends, or by `every` tokens each, in one batch; see `wave.advance`."""
        open_ = [growth for growth in growths if not growth.done]
        try:
            await advance(self, open_, every)
        except BaseException:
            for growth in open_:
                if not growth.done:
                    growth.end("abort")
            raise
        finally:
            for growth in open_:
                self._end_of_growth(growth)
        await self.flush()

    async def grow(
        self, nodes: Sequence[Node], *, delimiter: str | None = None, **overrides: Any
    ) -> None:
        """`begin` and `advance` to the end: one wave."""
        await self.advance(self.begin(nodes, delimiter=delimiter, **overrides))

    def _end_of_growth(self, growth: Growth) -> None:
        node = growth.node
        if node._branch is None:
            return
        node.finish_reason, node.stop_reason = growth.finish_reason, growth.stop_reason
        ended = growth.done and growth.finish_reason == "stop"
        ended_by_token = ended and not isinstance(growth.stop_reason, str)
        self._record(node, ended_by_token=ended_by_token)
        if growth.stop is not None:
            self._cut_at_stop(growth, growth.stop)
        if self._listener.is_listening:
            self._emit("node", node, {"node": node.model_dump(mode="json")})
        if growth.error is not None:
            self.prune([node], f"{type(growth.error).__name__}: {growth.error}")
        elif ended_by_token or growth.stop is not None:
            self.set_state(node, "finished")
        elif growth.done and growth.finish_reason == "abort":
            self.set_state(node, "cut", "the budget has no tokens left" if self.stopped_by else "")

    def _record(self, node: Node, *, ended_by_token: bool = False) -> None:
        """Copy the node's tokens from its branch."""
        branch = node.branch
        all_ids = branch.token_ids
        ids = all_ids[node._start :]
        before = all_ids[max(0, node._start - NUM_CONTEXT_IDS) : node._start]
        node.token_ids = ids
        node.logprobs = branch.logprobs[node._start : node._start + len(ids)]
        skips = self.params.skip_special_tokens
        node.token_texts = token_texts(self._tokenizer, ids, before, skips=skips)
        node.text, node._open_end = shown_text(
            self._tokenizer, ids, before, self.params, ended_by_token=ended_by_token
        )
        kv = branch.kv
        node.kv_shared_blocks, node.kv_private_blocks = kv.shared_blocks, kv.private_blocks

    def _cut_at_stop(self, growth: Growth, stop: str) -> None:
        """Cut the text at a stop of the params, as a generate's, which may be of several nodes."""
        nodes = [node for node in growth.node.path if node._start + node.num_tokens > growth.first]
        start = nodes[0]._start
        ids = growth.node.branch.token_ids
        before = ids[max(0, start - NUM_CONTEXT_IDS) : start]
        text, _ = shown_text(self._tokenizer, ids[start:], before, self.params, stop=stop)
        for node in nodes[:-1]:
            node.text, text = text[: len(node.text)], text[len(node.text) :]
        growth.node.text, growth.node._open_end = text, ""

    def _close_texts(self) -> None:
        """Show incomplete characters at the ends of nodes that nothing was grown from."""
        grown_from = {node.parent for node in self.tree.nodes}
        for node in self.tree.nodes:
            if node._open_end and node.id not in grown_from:
                node.text += node._open_end
                node.token_texts[-1] += node._open_end
                node._open_end = ""

    # ---- judging ------------------------------------------------------------------------------

    def scorer(self, score: Scorer | LLM | None) -> Scorer:
        """A scorer: the function itself, `mean_logprob` for None, a judge for an LLM.

        Raises:
            InvalidRequestError: none of these.
        """
        if score is None:
            return mean_logprob
        if isinstance(score, LLM):
            if score is self._given_root:
                return ask(JUDGE_QUESTION)
            self._judge = Judge(score, JUDGE_QUESTION)
            return self._judge
        if not callable(score):
            raise InvalidRequestError(f"score={score!r}: must be a function of a node, or an LLM")
        return score

    async def score(
        self, nodes: Sequence[Node], score: Callable[[Node], Any], name: str = "score"
    ) -> None:
        """Give every node that has tokens its score; async scorers run at once.

        Raises:
            InvalidRequestError: a score is no finite number.
            Exception: what the scorer raised.
        """
        scored = [node for node in nodes if node.token_ids and node.state != "pruned"]
        for node, value in zip(scored, await call_each(name, score, scored)):
            node.score = as_score(value, name, node)
            self._emit("score", node, {"score": node.score})
        await self.flush()

    async def extract(self, nodes: Sequence[Node], *, after: int = 0) -> None:
        """Take the answers out of the paths that end in these nodes.

        Args:
            after: characters of the path's text that are not looked at.
        """
        if self._extractor is None:
            return
        extractor = self._extractor
        fresh = [node for node in nodes if node.id not in self._extracted]
        answers = await call_each("extract", lambda node: extractor(node.path_text[after:]), fresh)
        for node, answer in zip(fresh, answers):
            node.answer = check_answer(answer)
            self._extracted.add(node.id)

    def set_state(self, node: Node, state: State, note: str = "") -> None:
        node.state = state
        if note:
            node.note = note
        data = {"state": state} | ({"note": node.note} if node.note else {})
        self._emit("state", node, data)

    def prune(self, nodes: Sequence[Node], note: str = "") -> None:
        """These are out: their branches go at once, with everything grown from them.

        One that the budget cut stays "cut": it lost no comparison.
        """
        for node in nodes:
            if node.state not in ("pruned", "cut"):
                self.set_state(node, "pruned", note)
            self.let_go(node)

    def let_go(self, node: Node) -> None:
        """The node's branch is not needed any more, nor is anything grown from it."""
        if node._branch is not None and node.id != 0:
            node._branch.prune()
            node._branch = None

    def retire(self, node: Node) -> None:
        """Only the node's children go on: its own handle is given up."""
        if node._branch is not None and node.id != 0:
            node._branch.close()
            node._branch = None

    def _emit(self, kind: Kind, node: Node | None, data: dict[str, Any]) -> None:
        self._listener.tell(kind, node, data)

    async def flush(self) -> None:
        """Let an async ``on_event`` hear what has happened."""
        await self._listener.flush()

    # ---- the end ------------------------------------------------------------------------------

    async def finish(
        self,
        candidates: Sequence[Node] | None = None,
        *,
        best: Node | None = None,
        stopped_by: StopReason = "completed",
        votes: VoteTable | None = None,
        answer: Any = _WINNERS,
    ) -> SearchResult:
        """The result, after the body: of what is there, however it ended.

        Args:
            candidates: nodes whose paths are answers; default: all steps without grown children
                that were not pruned. They are put in order: finished ones first, then by value.
            best: the winner; default: the first candidate.
            stopped_by: the natural end's name.
            votes: a vote's table.
            answer: of the search, None where there is none; default: the winner's.
        """
        self._close_texts()
        if candidates is None:
            steps = [n for n in self.tree.nodes[1:] if n.kind == "step" and n.token_ids]
            grown_from = {node.parent for node in steps}
            candidates = [node for node in steps if node.id not in grown_from]
        ranked = ranking([n for n in candidates if n.state != "pruned" and n.token_ids])
        while best is not None and not best.token_ids:  # it had no time to grow
            best = self.tree.nodes[best.parent] if best.parent else None
        if best is None and ranked:
            best = ranked[0]
        if best is None and answer is _WINNERS:
            answer = None
        elif answer is _WINNERS:
            assert best is not None
            if self._extractor is not None:
                answer = best.answer if best.id in self._extracted else self._extract_now(best)
            else:
                answer = best.path_text
        self.tree.best_id = None if best is None else best.id
        result = SearchResult(
            algorithm=self.tree.algorithm,
            tree=self.tree,
            best_id=self.tree.best_id,
            candidate_ids=[node.id for node in ranked],
            answer=answer,
            usage=self._usage,
            stopped_by=self.stopped_by or stopped_by,
            votes=votes,
        )
        summary = result.model_dump(mode="json", include={"best_id", "answer", "usage"})
        self._emit("end", None, summary | {"stopped_by": result.stopped_by})
        if _in_cancelled_scope():
            self._listener.forget()
        else:
            await self.flush()
        return result

    def _extract_now(self, node: Node) -> Any:
        """The answer of a node that the search had no time for, if the extractor is sync."""
        assert self._extractor is not None
        value = self._extractor(node.path_text)
        if inspect.isawaitable(value):
            if inspect.iscoroutine(value):
                value.close()
            return None
        node.answer = check_answer(value)
        return node.answer


def ranking(nodes: Sequence[Node]) -> list[Node]:
    """Best first: finished before unfinished, scored before not, then by value, then by id."""

    def key(node: Node) -> tuple[bool, bool, float, int]:
        value = node.score if node.value is None else node.value
        return (
            not node.is_finished,
            value is None,
            0.0 if value is None else -value,
            node.id,
        )

    return sorted(nodes, key=key)


def _in_cancelled_scope() -> bool:
    """An anyio or trio scope around this task was cancelled."""
    return anyio.current_effective_deadline() == -math.inf
