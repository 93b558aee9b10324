"""What random programs do with files: branches and subtrees are saved, damaged and loaded again."""

from __future__ import annotations

import errno
import gc
import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from draws import among, flag, number, verb
from shadows import MAX_LEN, Shadow
from tier_verbs import TierVerbs

from cotrt.engine import saving
from cotrt.engine.promise import Promise
from cotrt.errors import KVCacheExhaustedError, SavedBranchError
from cotrt.program.branch_files import load, save


@dataclass
class _Saved:
    """A branch as it was when its save was called."""

    seq: Any
    ids: list[int]
    logprobs: list[float | None]
    sampled: list[bool]
    seed: int
    epoch: int
    num_forks: int
    ended_at: int | None
    is_closed: bool


class SavingVerbs(TierVerbs):
    """Saves, between whose pieces steps run; loaded branches go on like all others."""

    def __init__(self) -> None:
        super().__init__()
        self.num_loaded = 0
        self.num_refused = 0
        self.num_damaged = 0

    @property
    def path(self) -> Path:
        folder = self.folder / "saved"
        folder.mkdir(exist_ok=True)
        return folder / "branch"

    @verb(
        2,
        pick=number,
        subtree=flag,
        kv=among("auto", "auto", "auto", "recompute"),
        damage=among(None, None, None, "cut", "noise"),
        piece=among(1, 64, 1 << 20),
    )
    def save_and_load(
        self, pick: int, subtree: bool, kv: str, damage: str | None, piece: int
    ) -> None:
        """Save, load, and then damage the file that the loaded branches have their KV in.

        Args:
            piece: bytes that are read between two steps.
        """
        owner = self.pick(pick)
        if owner is None:
            return
        self.settle()
        saved = self._as_it_is(owner, subtree)
        self._save(owner, subtree, piece)
        assert os.listdir(self.path.parent) == [self.path.name]
        try:
            root = load(self.rig.runtime, self.path, kv)
        except KVCacheExhaustedError:
            assert max(len(each.ids) for each in saved) > self.capacity
            return
        self.num_loaded += 1
        self._take_over(root, saved)
        self.look()
        if damage is not None:
            self._damage(damage, random.Random(pick))
            self.look()

    @verb(0.5, pick=number, subtree=flag, room=number)
    def no_space_for_a_save(self, pick: int, subtree: bool, room: int) -> None:
        """The disk fills up while a branch is saved: what was there stays, nothing beside it."""
        owner = self.pick(pick)
        if owner is None:
            return
        self.settle()
        before = self.path.read_bytes() if self.path.exists() else None
        left, write = room % 3000, os.pwrite

        def pwrite(fd: int, data: Any, offset: int) -> int:
            nonlocal left
            if not left:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            count = write(fd, data[:left], offset)
            left -= count
            return count

        with mock.patch.object(os, "pwrite", pwrite):
            try:
                self._save(owner, subtree, 64)
            except SavedBranchError as error:
                if "no space left" not in str(error):
                    raise
                self.num_refused += 1
                assert (self.path.read_bytes() if self.path.exists() else None) == before
        assert set(os.listdir(self.path.parent)) <= {self.path.name}
        self.look()

    def settle(self) -> None:
        """Steps until none is in flight, so that a call between steps is answered at once."""
        promise: Promise = self.rig.engine.when_between_steps(lambda: None)
        while not promise.done:
            self.step()

    def _save(self, owner: Shadow, subtree: bool, piece: int) -> None:
        engine, ask = self.rig.engine, self.rig.engine.when_between_steps

        def ask_after_a_step(call: Callable[[], Any]) -> Promise:
            if engine.has_work:
                self.step()
                self.settle_for(ask)
            return ask(call)

        engine.when_between_steps = ask_after_a_step  # type: ignore[method-assign]
        try:
            assert owner.branch is not None
            with mock.patch.object(saving, "_PIECE_BYTES", piece):
                save(owner.branch, self.path, subtree=subtree)
        finally:
            del engine.when_between_steps

    def settle_for(self, ask: Callable[[Callable[[], Any]], Promise]) -> None:
        promise = ask(lambda: None)
        while not promise.done:
            self.step()

    def _as_it_is(self, owner: Shadow, subtree: bool) -> list[_Saved]:
        assert owner.branch is not None
        self.look()
        first = owner.branch._seq
        living = saving._living(self.rig.engine, first) if subtree else [first]
        # One that is closed, and lives by its work alone, is not there again: works are not saved.
        wanted = {first}
        for seq in reversed(living):
            if seq is not first and (seq in wanted or not seq.closed):
                wanted |= {seq, seq.parent}
        return [
            _Saved(
                seq,
                seq.ids(),
                seq.span.slice_logprobs(0, seq.length),
                [bool(x) for x in seq.span.slice_sampled(0, seq.length)],
                seq.seed,
                seq.epoch,
                seq.num_forks,
                seq.ended_at,
                seq.closed and seq is not first,
            )
            for seq in living
            if seq in wanted
        ]

    def _take_over(self, root: Any, saved: list[_Saved]) -> None:
        """What was loaded is what was saved; shadows follow it from now on."""
        loaded = saving._living(self.rig.engine, root._seq)
        self.num_roots += 1
        handles = {branch._seq: branch for branch in (root, *root._kept)}
        assert len(loaded) == len(saved)
        shadows: dict[Any, Shadow] = {}
        for old, new in zip(saved, loaded, strict=True):
            assert new.length <= MAX_LEN + 1
            assert new.span.slice_logprobs(0, new.length) == old.logprobs
            assert (new.num_forks, new.ended_at) == (old.num_forks, old.ended_at)
            shadow = Shadow(
                handles.get(new),
                old.ids,
                old.sampled,
                old.seed,
                self.new_key(),
                old.epoch,
                old.num_forks,
                parent=None if new is root._seq else shadows[new.parent],
            )
            assert (shadow.branch is None) == old.is_closed
            if shadow.parent is not None:
                shadow.parent.children.append(shadow)
            shadows[new] = shadow
            self.shadows.append(shadow)
        root._kept.clear()  # the shadows hold them

    def _damage(self, kind: str, pick: random.Random) -> None:
        """The file that branches were just loaded from is cut or overwritten in place."""
        size = self.path.stat().st_size
        with open(self.path, "r+b") as file:
            if kind == "cut":
                file.truncate(pick.randrange(size))
            else:
                file.seek(pick.randrange(size))
                file.write(pick.randbytes(400))
        try:
            load(self.rig.runtime, self.path, "recompute").prune()
        except (SavedBranchError, KVCacheExhaustedError):
            pass
        else:
            raise AssertionError("a damaged file was loaded")
        self.num_damaged += 1
        self.path.unlink()  # the next save makes a new file

    def happened(self) -> Counter[str]:
        happened = super().happened()
        happened["files loaded"] = self.num_loaded
        happened["no space for a file"] = self.num_refused
        happened["loaded files damaged"] = self.num_damaged
        return happened

    def teardown(self) -> None:
        super().teardown()
        if self.num_loaded:
            self.rig.last_step = None
            assert self.rig.metrics  # which lets go of the steps that it counts
            gc.collect()
            self.rig.engine._drop_closed()
            assert not self.rig.engine._sources, "a file of a branch that is gone is held open"
