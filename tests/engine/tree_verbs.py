"""Verbs of random programs that need no model: branches are made, grown by given tokens and cut."""

from __future__ import annotations

import gc
from collections import Counter

from draws import among, flag, ids, number, verb
from program_base import ProgramBase
from shadows import MAX_LEN, Shadow, picked

from cotrt.errors import (
    BranchBusyError,
    InvalidRequestError,
    KVCacheExhaustedError,
    PromptTooLongError,
)
from cotrt.sampling.seeds import child_seed


class TreeVerbs(ProgramBase):
    """Root, fork, extend, truncate, prune, close, reopen, keep, and storms of forks."""

    def __init__(self) -> None:
        super().__init__()
        self.storms: Counter[int] = Counter()  # by how many forks
        self.num_leases = 0
        self.num_refused_leases = 0

    @verb(5, when=number, ids=ids)
    def root(self, when: int, ids: list[int]) -> None:
        self.do(when, lambda: self.new_root(ids))

    @verb(8, when=number, pick=number, n=among(1, 2, 3))
    def fork(self, when: int, pick: int, n: int) -> None:
        self.do(when, lambda: self.do_fork(pick, n, None))

    @verb(5, when=number, pick=number, at=number)
    def fork_at(self, when: int, pick: int, at: int) -> None:
        self.do(when, lambda: self.do_fork(pick, 1, at))

    def do_fork(self, pick: int, n: int, at: int | None) -> None:
        owner = self.pick(pick)
        if owner is None:
            return
        assert owner.branch is not None
        self.publish(owner)
        length = len(owner.ids)
        cut = length if at is None else at % (length + 1)
        for branch in owner.branch.fork(n, at=None if at is None else cut):
            seed = child_seed(owner.seed, owner.num_forks)
            owner.num_forks += 1
            child = Shadow(
                branch, owner.ids[:cut], owner.sampled[:cut], seed, self.new_key(), parent=owner
            )
            owner.children.append(child)
            self.shadows.append(child)

    @verb(7, when=number, pick=number, ids=ids)
    def extend(self, when: int, pick: int, ids: list[int]) -> None:
        self.do(when, lambda: self.do_extend(pick, ids))

    def do_extend(self, pick: int, ids: list[int]) -> None:
        owner = self.pick(pick)
        if owner is None:
            return
        assert owner.branch is not None
        try:
            owner.branch.extend(ids)
        except BranchBusyError:
            assert owner.busy is not None
        except PromptTooLongError:
            assert len(owner.ids) + len(ids) > MAX_LEN
        except KVCacheExhaustedError:
            assert len(owner.ids) + len(ids) > self.capacity
        else:
            assert owner.busy is None
            owner.ids += ids
            owner.sampled += [False] * len(ids)

    @verb(6, when=number, pick=number, at=number, same=flag)
    def truncate(self, when: int, pick: int, at: int, same: bool) -> None:
        self.do(when, lambda: self.do_truncate(pick, at, same))

    def do_truncate(self, pick: int, at: int, same: bool) -> None:
        owner = self.pick(pick)
        if owner is None:
            return
        assert owner.branch is not None
        length = at % (len(owner.ids) + 1)
        try:
            owner.branch.truncate(length, same_draws=same)
        except BranchBusyError:
            assert owner.busy is not None
            return
        assert owner.busy is None
        if length < len(owner.ids) and not same:
            owner.epoch += 1
        del owner.ids[length:], owner.sampled[length:]

    @verb(5, when=number, pick=number)
    def prune(self, when: int, pick: int) -> None:
        self.do(when, lambda: self.do_prune(pick))

    def do_prune(self, pick: int) -> None:
        owner = self.pick(pick)
        if owner is None:
            return
        assert owner.branch is not None
        stack = [owner]
        owner.branch.prune()
        while stack:
            each = stack.pop()
            each.pruned = True
            stack.extend(each.children)
            if each.branch is not None:
                assert not each.branch.alive
        self.look()

    @verb(3, when=number, pick=number, collect=lambda pick: pick.random() < 0.3)
    def close(self, when: int, pick: int, collect: bool) -> None:
        self.do(when, lambda: self.do_close(pick, collect))

    def do_close(self, pick: int, collect: bool) -> None:
        owner = self.pick(pick)
        if owner is None:
            return
        assert owner.branch is not None
        if not collect:
            owner.branch.close()
        owner.branch = None  # the last reference: as good as closed
        if collect and pick % 8 == 0:
            gc.collect()

    @verb(3, when=number, pick=number)
    def reopen(self, when: int, pick: int) -> None:
        """A handle of the parent, made again where it was closed or collected."""
        self.do(when, lambda: self._reopen(pick))

    def _reopen(self, pick: int) -> None:
        owner = self.pick(pick)
        if owner is None:
            return
        assert owner.branch is not None
        parent = owner.branch.parent
        if parent is None:
            assert owner.parent is None or owner.parent.pruned
            return
        assert owner.parent is not None and parent.id == parent._seq.id
        if owner.parent.branch is None:
            owner.parent.branch = parent
        assert owner.parent.branch is parent
        assert owner.branch in list(parent.children)

    @verb(2, when=number, pick=number, seconds=among(0, 1000))
    def keep(self, when: int, pick: int, seconds: int) -> None:
        """A lease, on KV that is there where some branch has any."""

        def act() -> None:
            there = [
                shadow
                for shadow in self.held()
                if shadow.branch is not None and shadow.branch.kv.location == "device"
            ]
            owner = picked(there, pick, lambda s: s.key) if there else self.pick(pick)
            if owner is not None and owner.branch is not None:
                try:
                    owner.branch.keep(seconds)
                except InvalidRequestError as error:
                    if "would be kept" not in str(error):
                        raise
                    self.num_refused_leases += 1
                else:
                    self.num_leases += bool(there and seconds)

        self.do(when, act)

    @verb(0.5, pick=number, n=lambda pick: 10_000 if pick.random() < 1 / 64 else 50)
    def storm(self, pick: int, n: int) -> None:
        """Many forks at once, which are pruned, closed and dropped again. Once for each `n`."""
        if self.storms[n]:
            return
        self.storms[n] += 1
        if not self.held():
            self.new_root([1, 2, 3])
        owner = self.pick(pick)
        assert owner is not None and owner.branch is not None
        self.publish(owner)
        children = owner.branch.fork(n)
        owner.num_forks += n
        can_start = 0 < len(owner.ids) <= min(self.capacity, MAX_LEN - 1)
        works = [children[pick % n].generate(max_tokens=3)] if can_start else []
        self.step()
        for child in children[: n // 3]:
            child.prune()
        for child in children[n // 3 : n // 2]:
            child.close()
        del children, child
        self.step()
        for work in works:
            work.cancel()
        self.look()

    def happened(self) -> Counter[str]:
        happened = super().happened()
        happened.update({f"{n} forks at once": count for n, count in self.storms.items()})
        happened["leases"] = self.num_leases
        happened["leases refused"] = self.num_refused_leases
        return happened
