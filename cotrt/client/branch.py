"""A branch on a server, with the verbs of a local one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

from cotrt.client.generation import RemoteGeneration
from cotrt.client.handle import RemoteHandle
from cotrt.client.plain import plain, plain_ids, plain_sampling
from cotrt.client.results import score_of
from cotrt.errors import BranchPrunedError
from cotrt.outputs import BranchKV, Choice

if TYPE_CHECKING:
    from cotrt.client.branches import RemoteBranches
    from cotrt.client.client import Client

Continuation = str | Sequence[int]


@dataclass(frozen=True, slots=True, eq=False)
class RemoteBranch:
    """A branch on a server, with the verbs of `cotrt.Branch`; as a context manager it prunes.

    Of those it lacks `save`, and `metadata`, which is the program's own and of one process.

    Every property asks the server, and every use renews the lease.
    """

    _client: Client
    _about: dict[str, Any]

    @property
    def id(self) -> str:
        """The server's id of it."""
        return str(self._about["id"])

    # ---- verbs that need no model -------------------------------------------------------------

    def fork(self, n: int = 1, *, at: int | None = None) -> RemoteBranches:
        """`n` children that share all KV. Errors are those of `Branch.fork`."""
        from cotrt.client.branches import RemoteBranches

        found = self._post("fork", {"n": n, "at": at})["data"]
        return RemoteBranches(self._client, [RemoteBranch(self._client, each) for each in found])

    def extend(self, text_or_ids: Continuation, *, special: bool = True) -> RemoteBranch:
        """Append forced tokens. Errors are those of `Branch.extend`."""
        name = "text" if isinstance(text_or_ids, str) else "token_ids"
        value = text_or_ids if isinstance(text_or_ids, str) else plain_ids(text_or_ids)
        self._about.update(self._post("extend", {name: value, "special": special}))
        return self

    def truncate(self, length: int, *, same_draws: bool = False) -> RemoteBranch:
        """Roll back to an absolute length. Errors are those of `Branch.truncate`."""
        self._about.update(self._post("truncate", {"length": length, "same_draws": same_draws}))
        return self

    def prune(self) -> None:
        """Cut it and everything grown from it; idempotent."""
        self._delete("true")

    def close(self) -> None:
        """Give it up; what has grown from it lives on. Idempotent."""
        self._delete("false")

    def keep(self, seconds: float) -> None:
        """A lease on its KV, as `Branch.keep`: for so long it is evicted last. 0 ends it.

        The server keeps the branch itself at least so long, used or not; that lease never becomes
        shorter. The server takes a day at most. Errors are those of `Branch.keep`.
        """
        self._about.update(self._post("keep", {"seconds": seconds}))

    # ---- verbs that need the model ------------------------------------------------------------

    def generate(self, params: Any = None, **overrides: Any) -> RemoteGeneration:
        """Sample; the branch grows by every sampled token.

        Args:
            params: a `SamplingParams`, or None for the model's defaults.
            **overrides: its fields to set on top.

        Raises:
            pydantic.ValidationError: a bad value or an unknown field; nothing was sent.
            InvalidRequestError: ``n`` is not 1; nothing was sent.
        """
        return RemoteGeneration(self, plain_sampling(params, overrides))

    def score(self, continuations: Any, *, given: Continuation = "") -> RemoteHandle[Any]:
        """Log-probability of continuations, as `Branch.score`."""
        body = {"continuations": plain(continuations), "given": plain(given)}

        def work(link: Callable[[Any], None]) -> Any:
            found = self._client._call("POST", self._path("score"), body, link)
            return list(map(score_of, found["data"])) if "data" in found else score_of(found)

        return RemoteHandle(work)

    def choose(
        self,
        options: Sequence[Continuation],
        *,
        given: Continuation = "",
        normalize: Literal["mean", "sum"] = "mean",
    ) -> RemoteHandle[Choice]:
        """Append the best option, as `Branch.choose`."""
        body = {"options": plain(options), "given": plain(given), "normalize": normalize}

        def work(link: Callable[[Any], None]) -> Choice:
            found = self._client._call("POST", self._path("choose"), body, link)
            scores = [score_of(each) for each in found["scores"]]
            return Choice(found["index"], found["option"], scores)

        return RemoteHandle(work)

    # ---- properties ---------------------------------------------------------------------------

    @property
    def token_ids(self) -> list[int]:
        """All token ids."""
        return list(self._get()["token_ids"])

    @property
    def logprobs(self) -> list[float | None]:
        """One entry a token; None where it was given."""
        return list(self._get()["logprobs"])

    @property
    def sampled(self) -> list[bool]:
        """One entry a token: whether it was sampled."""
        return list(self._get()["sampled"])

    @property
    def text(self) -> str:
        """What the model saw."""
        return str(self._get()["text"])

    def decode(
        self, start: int = 0, stop: int | None = None, skip_special_tokens: bool = False
    ) -> str:
        """Text of the tokens at absolute positions `start` to `stop`, as `Branch.decode`."""
        from cotrt.sampling.detokenizer import NUM_CONTEXT_IDS

        ids = self.token_ids
        first = slice(start, stop).indices(len(ids))[0]
        body = {
            "tokens": ids[start:stop],
            "before": ids[max(0, first - NUM_CONTEXT_IDS) : first],
            "skip_special_tokens": skip_special_tokens,
        }
        return str(self._client._call("POST", "/detokenize", body)["prompt"])

    @property
    def depth(self) -> int:
        """Forks between it and its root."""
        return int(self._about["depth"])

    @property
    def parent(self) -> RemoteBranch | None:
        """The branch it was forked from, if the server still has it."""
        parent = self._get(full=False)["parent"]
        if parent is None:
            return None
        path = f"/v1/branches/{quote(parent, safe='')}?full=false"
        return RemoteBranch(self._client, self._client._call("GET", path))

    @property
    def children(self) -> RemoteBranches:
        """Its living children."""
        from cotrt.client.branches import RemoteBranches

        wanted = set(self._get(full=False)["children"])
        found = [branch for branch in self._client.branches() if branch.id in wanted]
        return RemoteBranches(self._client, found)

    @property
    def alive(self) -> bool:
        """The server still has it."""
        try:
            self._get(full=False)
        except BranchPrunedError:
            return False
        return True

    @property
    def finished(self) -> bool:
        """Its last generation ended by an end-of-sequence token, and nothing came after."""
        return bool(self._get(full=False)["finished"])

    @property
    def kv(self) -> BranchKV:
        """Where its KV is now."""
        return BranchKV(**self._get(full=False)["kv"])

    def __len__(self) -> int:
        return int(self._get(full=False)["num_tokens"])

    def __bool__(self) -> bool:
        return True

    def __enter__(self) -> RemoteBranch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.prune()

    def __repr__(self) -> str:
        return f"<RemoteBranch {self.id}>"

    # ---- inside -------------------------------------------------------------------------------

    def _path(self, verb: str = "") -> str:
        return f"/v1/branches/{self.id}" + (f"/{verb}" if verb else "")

    def _post(self, verb: str, body: dict[str, Any]) -> Any:
        return self._client._call("POST", self._path(verb), body)

    def _get(self, *, full: bool = True) -> dict[str, Any]:
        query = "" if full else "?full=false"
        about: dict[str, Any] = self._client._call("GET", self._path() + query)
        return about

    def _delete(self, prune: str) -> None:
        with contextlib.suppress(BranchPrunedError):
            self._client._call("DELETE", f"{self._path()}?prune={prune}")
