"""Several branches with the verbs of one, each verb one batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, overload

from cotrt.engine.state import GenerationState
from cotrt.errors import InvalidRequestError
from cotrt.options.sampling import SamplingParams
from cotrt.outputs import Choice
from cotrt.program.handle import Generation, Generations, Handle, gather, joined
from cotrt.sampling.seeds import normalize_seed, output_seed

if TYPE_CHECKING:
    from cotrt.program.branch import Branch
    from cotrt.program.runtime import Runtime

Continuation = str | Sequence[int]


class Branches(Sequence["Branch"]):
    """Several branches with the verbs of one, run as one batch; a slice is one too.

    As a context manager it prunes all of them on leaving.

    Raises:
        InvalidRequestError: something among them is no `Branch`.
    """

    def __init__(self, branches: Iterable[Branch] = ()) -> None:
        from cotrt.program.branch import Branch

        if not hasattr(branches, "__iter__"):
            raise InvalidRequestError(
                f"Branches({branches!r:.80}): give a list of branches, not "
                f"{type(branches).__name__}"
            )
        self._branches = list(branches)
        for index, each in enumerate(self._branches):
            if not isinstance(each, Branch):
                raise InvalidRequestError(
                    f"Branches: item {index} is {type(each).__name__} {each!r:.80}, not a Branch; "
                    "llm.branch(prompt) makes one"
                )

    def generate(
        self, params: SamplingParams | Sequence[SamplingParams] | None = None, **overrides: Any
    ) -> Generations:
        """`Branch.generate` on each, in one batch.

        Args:
            params: one for all (an explicit seed gives the i-th branch ``hash(seed, i)``), or
                one each.
            **overrides: fields to set on top of each.

        Raises:
            InvalidRequestError: as many params as branches are needed, and those of
                `Branch.generate`; nothing is started then.
        """
        runtime = _runtime_of(self._branches)
        if runtime is None:
            return Generations(None, [])
        if params is None or isinstance(params, SamplingParams):
            one = runtime.params(params, overrides)
            seeds = [
                None if one.seed is None else output_seed(normalize_seed(one.seed), i)
                for i in range(len(self))
            ]
            return generate(self._branches, [one] * len(self), seeds)
        if len(params) != len(self):
            raise InvalidRequestError(
                f"{len(params)} params for {len(self)} branches: give one, or one each"
            )
        each = [runtime.params(p, overrides) for p in params]
        return generate(self._branches, each, [None] * len(self))

    def score(self, continuations: Any, *, given: Continuation = "") -> Handle[list[Any]]:
        """`Branch.score` on each: a handle of one `Score` (or list of them) a branch."""
        from cotrt.program.score import as_options, score

        many, options = as_options(continuations)
        handles = score(self._branches, options, given)

        def collect() -> list[Any]:
            return gather(handles, lambda h: h._collect() if many else h._collect()[0])

        return joined(_runtime_of(self._branches), handles, collect)

    def choose(
        self,
        options: Sequence[Continuation],
        *,
        given: Continuation = "",
        normalize: Literal["mean", "sum"] = "mean",
    ) -> Handle[list[Choice]]:
        """`Branch.choose` on each, in one batch."""
        from cotrt.program.choose import choose

        handles = choose(self._branches, options, given, normalize)
        runtime = _runtime_of(self._branches)
        return joined(runtime, handles, lambda: gather(handles, lambda h: h._collect()))

    def extend(
        self, text_or_ids: Continuation | Sequence[Continuation], *, special: bool = True
    ) -> Branches:
        """`Branch.extend` on each, or on none where one refuses.

        Args:
            text_or_ids: one text or list of ids for all, or a list with one each.
            special: as in `Branch.extend`.

        Raises:
            InvalidRequestError: not as many texts as branches, and as `Branch.extend`.
        """
        from cotrt.program.score import one_each

        each = one_each(text_or_ids, len(self))
        runtime = _runtime_of(self._branches)
        if runtime is None:
            return self
        runtime.check()
        what = "extend's argument"
        ids = [runtime.encode_continuation(text, special=special, what=what) for text in each]
        with runtime.engine.lock:
            for branch, more in zip(self._branches, ids):
                branch._check()
                runtime.check_length(branch._seq.length + len(more))
            for branch, more in zip(self._branches, ids):
                runtime.engine.table.extend(branch._seq, more)
        return self

    def fork(self, n: int = 1, *, at: int | None = None) -> Branches:
        """`n` children of each, those of the first branch first."""
        return Branches([child for b in self._branches for child in b.fork(n, at=at)])

    def truncate(self, length: int, *, same_draws: bool = False) -> Branches:
        """`Branch.truncate` on each, or on none where one refuses."""
        runtime = _runtime_of(self._branches)
        if runtime is None:
            return self
        runtime.check()
        with runtime.engine.lock:
            for branch in self._branches:
                branch._check()
                length = branch._check_length(length, "length")
            for branch in self._branches:
                runtime.engine.table.truncate(branch._seq, length, same_draws=same_draws)
        return self

    def prune(self) -> None:
        """Prune all."""
        for branch in self._branches:
            branch.prune()

    def close(self) -> None:
        """Close all."""
        for branch in self._branches:
            branch.close()

    @property
    def finished(self) -> Branches:
        """Those whose last generation ended by an end-of-sequence token."""
        return Branches([b for b in self._branches if b.finished])

    @overload
    def __getitem__(self, index: int) -> Branch: ...
    @overload
    def __getitem__(self, index: slice) -> Branches: ...
    def __getitem__(self, index: int | slice) -> Branch | Branches:
        """The branch at `index`, or `Branches` for a slice."""
        found = self._branches[index]
        return Branches(found) if isinstance(found, list) else found

    def __len__(self) -> int:
        return len(self._branches)

    def __enter__(self) -> Branches:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for branch in self._branches:
            branch._runtime.on_leaving(branch.prune)

    def __repr__(self) -> str:
        return f"Branches({self._branches!r})"


def generate(
    branches: Sequence[Branch], params: Sequence[SamplingParams], seeds: Sequence[int | None]
) -> Generations:
    """Start a generate on each, with its own params; nothing is started where one is refused.

    Args:
        branches: different ones of one runtime, at least one.
        params, seeds: one each; a seed of None is the branch's own.

    Raises:
        InvalidRequestError: and what else `Branch.generate` raises.
    """
    runtime = branches[0]._runtime
    runtime.check()
    with runtime.engine.lock:
        runtime.check()  # it may have stopped since
        states: list[GenerationState] = []
        seen: set[int] = set()
        for branch, one, seed in zip(branches, params, seeds):
            if one.n != 1:
                raise InvalidRequestError(f"n={one.n} on a branch: fork({one.n}) it instead")
            if one.prompt_logprobs is not None:
                raise InvalidRequestError("prompt_logprobs on a branch: llm.generate([b], params)")
            if id(branch._seq) in seen:
                raise InvalidRequestError(f"branch {branch.id} is in the batch twice")
            seen.add(id(branch._seq))
            branch._check()
            states.append(runtime.new_state(branch._seq, one, default_max_tokens=None, seed=seed))
        for state in states:
            runtime.engine.start_generation(state)
    return Generations(runtime, [Generation(runtime, state) for state in states])


def _runtime_of(branches: Sequence[Branch]) -> Runtime | None:
    """The runtime that all belong to; None for no branches.

    Raises:
        InvalidRequestError: they belong to several.
    """
    if not branches:
        return None
    runtime = branches[0]._runtime
    for branch in branches:
        runtime.check_owner(branch)
    return runtime
