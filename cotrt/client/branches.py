"""Several branches on a server."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, overload

from cotrt.client.branch import Continuation, RemoteBranch
from cotrt.client.generation import RemoteGeneration
from cotrt.client.handle import RemoteGathered
from cotrt.client.plain import plain_sampling
from cotrt.errors import InvalidRequestError
from cotrt.outputs import Choice, CompletionOutput

if TYPE_CHECKING:
    from cotrt.client.client import Client


class RemoteBranches(Sequence[RemoteBranch]):
    """Several branches with the verbs of one; as a context manager it prunes all."""

    def __init__(self, client: Client, branches: Iterable[RemoteBranch]) -> None:
        self._client = client
        self._branches = list(branches)

    def generate(self, params: Any = None, **overrides: Any) -> RemoteGathered[CompletionOutput]:
        """`RemoteBranch.generate` on each, together.

        Args:
            params: one for all (an explicit seed gives the i-th branch ``hash(seed, i)``), or a
                list with one each.
            **overrides: fields to set on top of each.

        Raises:
            pydantic.ValidationError, InvalidRequestError: as `RemoteBranch.generate`, for all
                before any starts.
        """
        if isinstance(params, (list, tuple)):
            if len(params) != len(self):
                raise InvalidRequestError(
                    f"{len(params)} params for {len(self)} branches: give one, or one each"
                )
            checked = [plain_sampling(each, overrides) for each in params]
            return RemoteGathered([RemoteGeneration(*each) for each in zip(self, checked)])
        from cotrt.sampling.seeds import normalize_seed, output_seed

        fields = plain_sampling(params, overrides)
        seed = fields.pop("seed", None)
        each = []
        for i, branch in enumerate(self._branches):
            own = {} if seed is None else {"seed": output_seed(normalize_seed(seed), i)}
            each.append(RemoteGeneration(branch, {**fields, **own}))
        return RemoteGathered(each)

    def score(self, continuations: Any, *, given: Continuation = "") -> RemoteGathered[Any]:
        """`RemoteBranch.score` on each, together."""
        return RemoteGathered([b.score(continuations, given=given) for b in self._branches])

    def choose(
        self,
        options: Sequence[Continuation],
        *,
        given: Continuation = "",
        normalize: Literal["mean", "sum"] = "mean",
    ) -> RemoteGathered[Choice]:
        """`RemoteBranch.choose` on each, together."""
        return RemoteGathered(
            [b.choose(options, given=given, normalize=normalize) for b in self._branches]
        )

    def extend(
        self, text_or_ids: Continuation | Sequence[Continuation], *, special: bool = True
    ) -> RemoteBranches:
        """`RemoteBranch.extend` on each, one after the other: an error leaves the rest as it was.

        Args:
            text_or_ids: one text or list of ids for all, or a list with one each.
            special: as in `Branch.extend`.
        """
        from cotrt.program.score import one_each

        for branch, text in zip(self._branches, one_each(text_or_ids, len(self))):
            branch.extend(text, special=special)
        return self

    def truncate(self, length: int, *, same_draws: bool = False) -> RemoteBranches:
        """`RemoteBranch.truncate` on each, one after the other, as `extend`."""
        for branch in self._branches:
            branch.truncate(length, same_draws=same_draws)
        return self

    def fork(self, n: int = 1, *, at: int | None = None) -> RemoteBranches:
        """`n` children of each, those of the first branch first."""
        found = [child for branch in self._branches for child in branch.fork(n, at=at)]
        return RemoteBranches(self._client, found)

    def prune(self) -> None:
        """Prune all."""
        for branch in self._branches:
            branch.prune()

    def close(self) -> None:
        """Close all."""
        for branch in self._branches:
            branch.close()

    @property
    def finished(self) -> RemoteBranches:
        """Those whose last generation ended by an end-of-sequence token."""
        return RemoteBranches(self._client, [b for b in self._branches if b.finished])

    @overload
    def __getitem__(self, index: int) -> RemoteBranch: ...
    @overload
    def __getitem__(self, index: slice) -> RemoteBranches: ...
    def __getitem__(self, index: int | slice) -> RemoteBranch | RemoteBranches:
        found = self._branches[index]
        return RemoteBranches(self._client, found) if isinstance(found, list) else found

    def __len__(self) -> int:
        return len(self._branches)

    def __enter__(self) -> RemoteBranches:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.prune()
