"""Branches that programs in other processes hold: by id, on a lease, each owned by one key."""

from __future__ import annotations

import math
import re
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cotrt.options.sampling import SamplingParams
from cotrt.program.branch import Branch
from cotrt.program.conversation import Continuation
from cotrt.program.handle import Generation
from cotrt.program.llm import LLM
from cotrt.server.errors import ApiError
from cotrt.server.options import ServerOptions

_NUMBER = re.compile(r"\bbranch (\d+)\b")


@dataclass(slots=True, eq=False)
class Lease:
    """One branch over HTTP.

    Attributes:
        id: what clients call it.
        branch: the branch itself.
        owner: hash of the key that made it.
        ttl: seconds that it lives on after its last use.
        expires: monotonic time of its end.
        kept_until: monotonic time before which it does not end, whatever the ttl.
    """

    id: str
    branch: Branch
    owner: str
    ttl: float
    expires: float
    kept_until: float = 0.0


class BranchTable:
    """All leases.

    Laws: an id is found by its owner only; a branch that was pruned has no lease; per owner and in
    all there are never more leases than the limits say.
    """

    def __init__(self, llm: LLM, options: ServerOptions) -> None:
        self._llm = llm
        self._options = options
        self._leases: dict[str, Lease] = {}
        self._ids: dict[int, str] = {}  # of the engine's sequences
        self._num_owned: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def check_ttl(self, ttl: float | None) -> float:
        """The lease to give.

        Raises:
            ApiError: longer than the limit, or no time at all.
        """
        if ttl is None:
            return min(self._options.default_ttl_s, self._options.max_ttl_s)
        if not (math.isfinite(ttl) and 0 < ttl <= self._options.max_ttl_s):
            raise ApiError(
                400, f"ttl={ttl}: must be above 0, at most {self._options.max_ttl_s}", param="ttl"
            )
        return float(ttl)

    def check_room(self, owner: str, count: int) -> None:
        """Raise ApiError where `count` more are too many: 429 for now, 400 for ever."""
        options = self._options
        mine = self._num_owned.get(owner, 0)
        limits = (
            (mine, options.max_branches_per_key, "yours"),
            (len(self), options.max_branches, "in all"),
        )
        for now, limit, whose in limits:
            if count > limit:
                raise ApiError(400, f"{count} branches, the limit is {limit} {whose}", param="n")
            if now + count > limit:
                raise ApiError(
                    429,
                    f"{now} branches live ({whose}), {count} more would pass the limit of {limit}: "
                    "delete some, or wait until their leases end",
                    code="too_many_branches",
                    headers={"retry-after": "5"},
                )

    def add(self, branches: Iterable[Branch], owner: str, ttl: float) -> list[Lease]:
        """New leases. The caller has checked that there is room."""
        made = []
        for branch in branches:
            lease_id = f"br-{secrets.token_hex(12)}"
            lease = Lease(lease_id, branch, owner, ttl, time.monotonic() + ttl)
            self._leases[lease_id] = lease
            self._ids[branch.id] = lease_id
            self._num_owned[owner] = self._num_owned.get(owner, 0) + 1
            made.append(lease)
        return made

    def find(self, lease_id: str, owner: str) -> Lease:
        """The owner's branch, its lease renewed.

        Raises:
            ApiError: 404 for one that is not there, has ended, or is somebody else's.
        """
        lease = self._leases.get(lease_id)
        if lease is None or lease.owner != owner:
            raise ApiError(
                404,
                f"there is no branch {lease_id[:80]!r}: it was deleted, its lease ended, or "
                "another key made it",
                code="branch_not_found",
            )
        self.renew(lease)
        return lease

    def renew(self, lease: Lease) -> None:
        """Start the lease anew."""
        lease.expires = max(time.monotonic() + lease.ttl, lease.kept_until)

    def keep(self, lease: Lease, seconds: float) -> None:
        """`Branch.keep`, and a lease that does not end before it. No lease becomes shorter.

        Raises:
            ApiError: longer than a branch may live unused.
            InvalidRequestError: as `Branch.keep`; nothing has changed then.
        """
        limit = self._options.max_ttl_s
        if seconds > limit:
            raise ApiError(
                400, f"seconds={seconds}: must be at most {limit}; keep it again", param="seconds"
            )
        lease.branch.keep(seconds)
        lease.kept_until = max(lease.kept_until, time.monotonic() + seconds)
        self.renew(lease)

    def owned(self, owner: str) -> list[Lease]:
        """All of an owner's branches, oldest first."""
        return [lease for lease in self._leases.values() if lease.owner == owner]

    def id_of(self, sequence_id: int, owner: str) -> str | None:
        """The id under which an owner knows a sequence of the engine."""
        lease = self._leases.get(self._ids.get(sequence_id, ""))
        return lease.id if lease is not None and lease.owner == owner else None

    def with_ids(self, message: str, owner: str) -> str:
        """A message of the engine, with the owner's ids for the engine's numbers of branches."""

        def named(found: re.Match[str]) -> str:
            lease_id = self.id_of(int(found[1]), owner)
            return found[0] if lease_id is None else f"branch {lease_id}"

        return _NUMBER.sub(named, message)

    def prune(self, lease: Lease) -> None:
        """Cut the branch and everything grown from it."""
        lease.branch.prune()
        for each in list(self._leases.values()):
            if each.branch._seq.pruned:
                self._forget(each)

    def close(self, lease: Lease) -> None:
        """Give up one branch; what has grown from it lives on."""
        self._forget(lease)
        lease.branch.close()

    def end_expired(self) -> int:
        """Close branches whose lease has ended; a busy one is in use.

        Returns:
            How many.
        """
        now, count = time.monotonic(), 0
        for lease in list(self._leases.values()):
            if lease.branch._seq.is_busy:
                self.renew(lease)
            elif lease.expires <= now:
                self.close(lease)
                count += 1
        return count

    def prune_all(self) -> None:
        """At the end of the server."""
        for lease in list(self._leases.values()):
            self._forget(lease)
            lease.branch.prune()

    def _forget(self, lease: Lease) -> None:
        if self._leases.pop(lease.id, None) is not None:
            self._ids.pop(lease.branch.id, None)
            left = self._num_owned[lease.owner] - 1
            self._num_owned[lease.owner] = left
            if not left:
                del self._num_owned[lease.owner]

    # ---- as JSON ------------------------------------------------------------------------------

    def describe(self, lease: Lease, *, full: bool = False) -> dict[str, Any]:
        """A branch as JSON data; `full` with its tokens and text."""
        branch, runtime = lease.branch, self._llm._runtime
        with runtime.engine.lock:
            seq = branch._seq
            parent = None if seq.parent is None else self.id_of(seq.parent.id, lease.owner)
            children = [self.id_of(c.id, lease.owner) for c in seq.living_children()]
            kv = branch.kv
            about: dict[str, Any] = {
                "id": lease.id,
                "object": "branch",
                "parent": parent,
                "children": [child for child in children if child is not None],
                "depth": branch.depth,
                "num_tokens": seq.length,
                "running": seq.is_busy,
                "finished": branch.finished,
                "ttl": lease.ttl,
                "expires_in": round(max(0.0, lease.expires - time.monotonic()), 3),
                "kv": {name: getattr(kv, name) for name in kv.__slots__},
            }
            if full:
                about["token_ids"] = branch.token_ids
                about["logprobs"] = branch.logprobs
                about["sampled"] = branch.sampled
        if full:
            has_text = runtime.tokenizer is not None
            about["text"] = runtime.decode(about["token_ids"]) if has_text else None
        return about

    # ---- chats --------------------------------------------------------------------------------

    def reply(
        self, lease: Lease, rendering: Mapping[str, Any], params: SamplingParams
    ) -> tuple[Continuation, Generation]:
        """Reply to a conversation on a branch: what it holds of it already is kept.

        Raises:
            BranchBusyError: it is generating, or was changed meanwhile.
            CotrtError: what `Branch.generate` raises; the branch is unchanged then.
        """
        rest = {k: v for k, v in rendering.items() if k != "messages"}
        continuation = Continuation(lease.branch, rendering["messages"], rest)
        return continuation, continuation.start(params)
