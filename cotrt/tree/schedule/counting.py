"""Which tokens were computed before: a hash of every (path, token), and a bounded memory of them.

The hash of a path is the sum, modulo 2^64, of one mixed 64-bit word for each (position, token):
order matters through the position, and a path grows by one addition, for many rows at once.
The mixer is SplitMix64 (Steele, Lea and Flood, 2014).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cotrt.tree.node import Node
from cotrt.tree.sequence import Sequence

UInt64 = npt.NDArray[np.uint64]

_POSITION = np.uint64(0x9E3779B97F4A7C15)
_TOKEN = np.uint64(0xD1B54A32D192ED03)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)
_MASK = (1 << 64) - 1


def token_hashes(positions: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]) -> UInt64:
    """One word for each (position, token); shapes ``[n]``."""
    x = positions.astype(np.uint64) * _POSITION + tokens.astype(np.uint64) * _TOKEN
    x = (x ^ (x >> _S30)) * _MIX_1
    x = (x ^ (x >> _S27)) * _MIX_2
    return np.asarray(x ^ (x >> _S31))


def path_hash(seq: Sequence, length: int) -> int:
    """Hash of the first `length` tokens, ``node.end <= length``; nodes remember their share."""
    end = _node_hash(seq.node)
    if length == seq.node.end:
        return end
    tokens = np.array(seq.span.slice_ids(seq.node.end, length), dtype=np.int64)
    positions = np.arange(seq.node.end, length, dtype=np.int64)
    return (end + int(token_hashes(positions, tokens).sum(dtype=np.uint64))) & _MASK


def _node_hash(node: Node) -> int:
    chain = []
    at: Node | None = node
    while at is not None and at.parent is not None and at.num_hashed != len(at.blocks):
        chain.append(at)
        at = at.parent
    total = at.path_hash if at is not None and at.parent is not None else 0
    for at in reversed(chain):
        if at.num_hashed <= 0:
            at.num_hashed, at.path_hash = 0, total
        fresh = at.keys[at.num_hashed :]
        size = len(fresh[0])
        first = at.start + at.num_hashed * size
        tokens = np.array(fresh, dtype=np.int64).ravel()
        positions = np.arange(first, first + len(tokens), dtype=np.int64)
        words = int(token_hashes(positions, tokens).sum(dtype=np.uint64))
        at.path_hash = (at.path_hash + words) & _MASK
        at.num_hashed = len(at.blocks)
        total = at.path_hash
    return total


class SeenTokens:
    """The path hashes of tokens computed so far: exact for the last `capacity` at least.

    Two open-addressing tables, at most half full. The younger begins small; once it holds
    `capacity` hashes it is made the older. At most ``4 * capacity * 8`` bytes in all, touched as
    they fill.
    """

    def __init__(self, capacity: int = 1 << 20) -> None:
        assert capacity & (capacity - 1) == 0
        self._capacity = capacity
        self._young = _empty(min(capacity, 1 << 12))
        self._old: UInt64 | None = None
        self._count = 0

    def add(self, hashes: UInt64) -> npt.NDArray[np.bool_]:
        """Remember `hashes` ``[n]``.

        Returns:
            ``[n]`` True where a hash was not known and is the first of its kind in the call.
        """
        new = np.zeros(len(hashes), dtype=np.bool_)
        for begin in range(0, len(hashes), self._capacity):
            part = slice(begin, begin + self._capacity)
            new[part] = self._add(hashes[part])
        return new

    def _add(self, hashes: UInt64) -> npt.NDArray[np.bool_]:
        hashes = np.where(hashes == 0, np.uint64(1), hashes)  # 0 marks an empty slot
        unique, first = np.unique(hashes, return_index=True)
        known = _find(self._young, unique)
        if self._old is not None:
            known |= _find(self._old, unique)
        new = np.zeros(len(hashes), dtype=np.bool_)
        new[first[~known]] = True
        fresh = unique[~known]
        if self._count + len(fresh) > self._capacity:
            self._old, self._young, self._count = self._young, _empty(self._capacity), 0
        elif 2 * (self._count + len(fresh)) > len(self._young):
            kept = self._young[self._young != 0]
            self._young = _empty(self._capacity)  # at once: no step waits for a large move
            _insert(self._young, kept)
        _insert(self._young, fresh)
        self._count += len(fresh)
        return new


def _empty(capacity: int) -> UInt64:
    return np.zeros(2 * capacity, dtype=np.uint64)


def _find(table: UInt64, hashes: UInt64) -> npt.NDArray[np.bool_]:
    """``[n]`` whether each of `hashes` ``[n]`` is in `table`."""
    found = np.zeros(len(hashes), dtype=np.bool_)
    where = np.arange(len(hashes))
    mask = np.uint64(len(table) - 1)
    slots = hashes & mask
    while len(where):
        there = table[slots]
        hit = there == hashes[where]
        found[where[hit]] = True
        go_on = ~hit & (there != 0)
        where, slots = where[go_on], (slots[go_on] + np.uint64(1)) & mask
    return found


def _insert(table: UInt64, hashes: UInt64) -> None:
    """Put different `hashes`, none of which is there, into `table`."""
    mask = np.uint64(len(table) - 1)
    slots = hashes & mask
    while len(hashes):
        empty = table[slots] == 0
        table[slots[empty]] = hashes[empty]  # of two for one slot, the last one stays
        lost = table[slots] != hashes
        hashes, slots = hashes[lost], (slots[lost] + np.uint64(1)) & mask
