"""A loaded file as a source of records: its KV by the keys of this engine's blocks.

Files know no blocks: what a block of any size holds is put together from the chunks of the
branches on its path.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cotrt.plan import UInt8
from cotrt.saved.reader import SavedFile
from cotrt.tree.tiers.record_keys import next_key, root_key


class Part(NamedTuple):
    """`num_tokens` positions from `start` on, on the path of a branch of the file."""

    branch: int
    start: int
    num_tokens: int


class SavedSource:
    """Records of up to `block_size` tokens, made of a file's KV when they are asked for.

    Safe to use from several threads. It holds the file open.

    Args:
        file: the file.
        name: of the model's KV, as `kv_name`; the file's is of that name.
        first: the key before the first block, one that nobody else has where what the file has is
            not for everybody; None: that of the name (`root_key`).
        block_size: tokens a block of this engine.

    Attributes:
        num_covered: by branch, leading tokens whose KV is in the file without a gap.
    """

    def __init__(
        self, file: SavedFile, *, name: str, block_size: int, first: bytes | None = None
    ) -> None:
        self._file = file
        self._size = block_size
        self._paths = _Paths(file)
        self._keys: dict[bytes, Part] = {}
        self.num_covered = [0] * len(file.branches)
        self._name_all(first or root_key(name, block_size))

    def keys(self) -> Mapping[bytes, Part]:
        """Every block, and every tail at which KV in the file ends, by its key."""
        return self._keys

    def read(self, handle: Part) -> UInt8:
        """A record, ``[layer][K, V][token][head][dim]``, checked again.

        Raises:
            SavedBranchError: the file was cut or changed since it was loaded.
        """
        pieces = self._paths.pieces(handle.branch, handle.start, handle.start + handle.num_tokens)
        parts = [self._file.read_kv(*piece) for piece in pieces]
        return parts[0] if len(parts) == 1 else self._file.shape.join(parts)

    def close(self) -> None:
        """Give up the file; what is read later fails."""
        self._file.close()

    def _name_all(self, first: bytes) -> None:
        size, paths = self._size, self._paths
        ends: list[list[bytes]] = []  # by branch, the keys of whole blocks that end in its own part
        for index, branch in enumerate(self._file.branches):
            block = branch.shared // size
            key = self._key_before(ends, index, block, first)
            own: list[bytes] = []
            covered = self._covered_before(index, block * size)
            for start in range(block * size, branch.length, size):
                stop = min(start + size, branch.length)
                count = paths.num_with_kv(index, start, stop)
                ids = paths.tokens(index, start, stop)
                if count:
                    self._keys.setdefault(next_key(key, ids[:count]), Part(index, start, count))
                if covered == start:
                    covered = start + count
                if stop - start == size:
                    key = next_key(key, ids)
                    own.append(key)
            ends.append(own)
            self.num_covered[index] = covered

    def _key_before(self, ends: list[list[bytes]], index: int, block: int, first: bytes) -> bytes:
        """The key before a block, the first that a branch has tokens of its own in."""
        branches = self._file.branches
        while block:
            index = self._paths.above[index]
            begin = branches[index].shared // self._size
            if block > begin:
                return ends[index][block - begin - 1]
        return first

    def _covered_before(self, index: int, stop: int) -> int:
        """`stop`, if the path has KV up to there without a gap; else less."""
        if stop == 0:
            return 0
        return min(stop, self.num_covered[self._file.branches[index].parent])


class _Paths:
    """The tokens of each branch of a file, found in the branches that own them.

    Attributes:
        above: by branch, the nearest ancestor with tokens of its own before those of the branch.
    """

    def __init__(self, file: SavedFile) -> None:
        self._file = file
        self.above: list[int] = []
        for branch in file.branches:
            above = branch.parent
            while above >= 0 and file.branches[above].shared >= branch.shared > 0:
                above = self.above[above]
            self.above.append(above)

    def pieces(self, index: int, start: int, stop: int) -> list[tuple[int, int, int]]:
        """``(owner, start, stop)`` for each owner of a part of the positions, in their order."""
        found = []
        while start < stop:
            begin = max(start, self._file.branches[index].shared)
            if begin < stop:
                found.append((index, begin, stop))
                stop = begin
            index = self.above[index]
        found.reverse()
        return found

    def tokens(self, index: int, start: int, stop: int) -> list[int]:
        """Token ids at some positions of a branch's path."""
        parts: list[npt.NDArray[np.int32]] = []
        for owner, begin, end in self.pieces(index, start, stop):
            branch = self._file.branches[owner]
            parts.append(branch.tokens[begin - branch.shared : end - branch.shared])
        return [token for part in parts for token in part.tolist()]

    def num_with_kv(self, index: int, start: int, stop: int) -> int:
        """How many positions from `start` on have KV in the file, at most to `stop`."""
        for owner, begin, end in self.pieces(index, start, stop):
            found = self._file.kv_stop(owner, begin, end)
            if found < end:
                return found - start
        return stop - start
