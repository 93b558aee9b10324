"""What random programs may do with files: save branches and subtrees, and load them again."""

from __future__ import annotations

import gc
import os
import random
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import rule
from tree_program import MAX_LEN, Shadow, TreeProgram, numbers

from cotrt.engine.saving import _living
from cotrt.errors import KVCacheExhaustedError, SavedBranchError
from cotrt.saving import load, save


class SavingProgram(TreeProgram):
    """A `TreeProgram` that saves and loads too; loaded branches go on like all others."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self._path = Path(self._folder.name) / "branch"
        self.num_loaded = 0

    @rule(
        pick=numbers,
        subtree=st.booleans(),
        kv=st.sampled_from(["auto", "auto", "auto", "recompute"]),
        damage=st.sampled_from([None, None, None, "cut", "noise"]),
    )
    def save_and_load(self, pick: int, subtree: bool, kv: str, damage: str | None) -> None:
        owner = self._pick(pick)
        if owner is None:
            return
        assert owner.branch is not None
        self._publish(owner)
        seq = owner.branch._seq
        saved = _living(self.rig.engine, seq) if subtree else [seq]
        save(owner.branch, self._path, subtree=subtree)
        assert os.listdir(self._folder.name) == ["branch"]
        self._look()
        try:
            root = load(self.rig.runtime, self._path, kv)
        except KVCacheExhaustedError:
            assert max(each.length for each in saved) > self.capacity
            return
        loaded = _living(self.rig.engine, root._seq)
        self.num_roots += 1
        self.num_loaded += 1
        handles = {branch._seq: branch for branch in (root, *root._kept)}
        assert len(loaded) == len(saved)
        shadows: dict[Any, Shadow] = {}
        for old, new in zip(saved, loaded, strict=True):
            assert new.length <= MAX_LEN + 1
            assert new.span.slice_logprobs(0, new.length) == old.span.slice_logprobs(0, old.length)
            assert (new.num_forks, new.ended_at) == (old.num_forks, old.ended_at)
            shadow = Shadow(
                handles.get(new),
                old.ids(),
                [bool(x) for x in old.span.slice_sampled(0, old.length)],
                old.seed,
                old.epoch,
                old.num_forks,
                parent=None if new is root._seq else shadows[new.parent],
            )
            assert (shadow.branch is None) == (old.closed and old is not seq)
            if shadow.parent is not None:
                shadow.parent.children.append(shadow)
            shadows[new] = shadow
            self.shadows.append(shadow)
        root._kept.clear()  # the shadows hold them
        if damage is not None:
            self._damage(damage, random.Random(pick))
        self._look()

    def _damage(self, kind: str, pick: random.Random) -> None:
        """The file that branches were just loaded from is cut or overwritten in place."""
        size = self._path.stat().st_size
        with open(self._path, "r+b") as file:
            if kind == "cut":
                file.truncate(pick.randrange(size))
            else:
                file.seek(pick.randrange(size))
                file.write(pick.randbytes(400))
        try:
            load(self.rig.runtime, self._path, "recompute").prune()
        except (SavedBranchError, KVCacheExhaustedError):
            pass
        else:
            raise AssertionError("a damaged file was loaded")
        self._path.unlink()  # the next save makes a new file

    def teardown(self) -> None:
        try:
            super().teardown()
            if hasattr(self, "rig"):
                self.rig.last_step = None
                assert self.rig.metrics  # which lets go of the steps that it counts
                gc.collect()
                self.rig.engine._drop_closed()
                assert not self.rig.engine._sources, "a file of a branch that is gone is held open"
        finally:
            if hasattr(self, "rig") and self.rig.engine.records is not None:
                self.rig.engine.records.close()
            self._folder.cleanup()
