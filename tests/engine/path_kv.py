"""KV of a test's model: of every token its id, and a hash of the path up to and with it.

The hash of position p is made from the one that is read at p - 1, as a model's KV is from all
before. So a block of the right tokens that was computed after others is wrong, wherever it is from.

    hash before position 0 = 1
    hash of position p     = hash of position p - 1 * odd + token + 1, modulo 2^32
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cotrt.plan import AttentionPlan
from cotrt.testing import _Paths

UInt32 = npt.NDArray[np.uint32]

BEFORE_ALL = 1
_ODD = 0x9E3779B1


def hash_after(before: int, token: int) -> int:
    """The hash of a token that comes after a path of hash `before`."""
    return (before * _ODD + token + 1) & 0xFFFFFFFF


def hashes_after(before: UInt32, tokens: npt.NDArray[np.int32]) -> UInt32:
    """`hash_after` of each pair."""
    return before * np.uint32(_ODD) + tokens.astype(np.uint32) + np.uint32(1)


def path_records(ids: Sequence[int], size: int) -> list[bytes]:
    """The record of each block of a path, and of its tail."""
    hashes = list(itertools.accumulate(ids, hash_after, initial=BEFORE_ALL))[1:]
    return [
        np.array(ids[i : i + size], np.int32).tobytes()
        + np.array(hashes[i : i + size], np.uint32).tobytes()
        for i in range(0, len(ids), size)
    ]


class HashedPaths(_Paths):
    """The tokens that the rows of a step see, each of which was computed after those before it.

    Args:
        ids, hashes: ``[num_blocks, block_size]`` KV.
    """

    def __init__(self, plan: AttentionPlan, ids: npt.NDArray[np.int32], hashes: UInt32) -> None:
        super().__init__(plan, ids)
        self._hashes = hashes
        self._read: dict[int, list[int]] = {}  # hashes by group, once a row has asked for them

    def hash_before(self, row: int) -> int:
        """What is read at the position before the row's own."""
        last = self._positions[row] - 1
        if last < 0:
            return BEFORE_ALL
        for group in self._groups.get(row, ()):
            at = last - self._starts[group]
            if 0 <= at < self._lengths[group]:
                block = self._blocks[self._block_offsets[group] + at // self._size]
                return int(self._hashes[block, at % self._size])
        raise AssertionError(f"row {row} at {last + 1} does not see {last}")

    def of(self, row: int) -> list[int]:
        """Tokens at positions 0 to the row's own."""
        path, before = super().of(row), BEFORE_ALL
        for group in sorted(self._groups[row], key=self._starts.__getitem__):
            start = self._starts[group]
            count = min(self._lengths[group], len(path) - start)
            if count > 0:
                hashes = self._hashes_of(group)
                assert hashes[0] == hash_after(before, path[start]), (
                    f"row {row}: KV of position {start} was computed after another path"
                )
                before = hashes[count - 1]
        return path

    def _hashes_of(self, group: int) -> list[int]:
        found = self._read.get(group)
        if found is None:
            count, first = self._lengths[group], self._block_offsets[group]
            blocks = self._blocks[first : first + -(-count // self._size)]
            hashes = self._hashes[blocks].reshape(-1)[:count]
            tokens = self._kv[blocks].reshape(-1)[:count]
            wrong = np.flatnonzero(hashes[1:] != hashes_after(hashes[:-1], tokens[1:]))
            if wrong.size:
                position = self._starts[group] + wrong[0] + 1
                raise AssertionError(f"KV of position {position} was computed after another path")
            found = self._read[group] = hashes.tolist()
        return found


def check_chains(contents: npt.NDArray[np.int32], chains: Any) -> None:
    """Blocks hold what was computed after the block that comes before them.

    Args:
        contents: ``[num_blocks, 2 * block_size]``, of each block its token ids and their hashes.
        chains: of each block to look at: its id, that of the one before it or -1, and its tokens.
    """
    if not chains:
        return
    size = contents.shape[1] // 2
    tokens, hashes = contents[:, :size], contents[:, size:].view(np.uint32)
    blocks, before, lengths = np.array(chains).T
    first = np.where(before < 0, np.uint32(BEFORE_ALL), hashes[before, -1])
    held = hashes[blocks]
    expected = hashes_after(np.column_stack([first, held[:, :-1]]), tokens[blocks])
    wrong = np.argwhere((held != expected) & (np.arange(size) < lengths[:, None]))
    assert not wrong.size, f"block {blocks[wrong[0][0]]} was computed after another path"
