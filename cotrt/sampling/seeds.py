"""Seeds of branches, as 64-bit hashes in plain Python ints.

Every child's seed comes from its parent's seed and its fork number (forks ever made of that
parent), every root's from ``LLM.seed`` and the root's number, and the i-th output of one explicit
seed from that seed and i. The three hash with constants of their own, so that, say, the first
child of a branch never draws like the second output of its seed.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / the golden ratio: splitmix64's step
_CHILD, _ROOT, _OUTPUT = 0xD1B54A32D192ED03, 0xABC98388FB8FAC03, 0x8CB92BA72F3D8DD7


def mix64(value: int) -> int:
    """splitmix64's finaliser: a bijection of 64-bit ints that looks random."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def normalize_seed(seed: int) -> int:
    """A user's seed, -2^63 to 2^64 - 1, as an unsigned 64-bit int."""
    return seed & _MASK


def root_seed(seed: int, number: int) -> int:
    """The seed of root ``number`` (0, 1, ...) of an engine whose seed is ``seed``."""
    return _hash(seed, number, _ROOT)


def child_seed(seed: int, fork_number: int) -> int:
    """The seed of a branch's child, by how many forks were ever made of it before."""
    return _hash(seed, fork_number, _CHILD)


def output_seed(seed: int, index: int) -> int:
    """The seed of output ``index`` of an explicit seed given once; output 0 has the seed itself."""
    return _hash(seed, index, _OUTPUT) if index else normalize_seed(seed)


def _hash(seed: int, number: int, stream: int) -> int:
    return mix64(mix64(seed + stream) + (number + 1) * _GOLDEN)
