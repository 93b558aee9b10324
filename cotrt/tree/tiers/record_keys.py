"""Keys of records: a block of KV named by its path, the same in every process that has the model.

    key before block 0 = blake2b-256(fingerprint, block size)
    key of block i     = blake2b-256(key of block i - 1, token ids of block i as uint32)

A partial tail has a key of the same kind, of its k tokens. Keys are hashed when a tier or a save
first asks for them, and kept on the tree's nodes.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cotrt.tree.node import Node

KEY_BYTES = 32


def root_key(fingerprint: str, block_size: int) -> bytes:
    """The key before the first block."""
    return _hash(fingerprint.encode() + struct.pack("<I", block_size))


def next_key(key: bytes, ids: Sequence[int]) -> bytes:
    """The key of the block (or tail) of tokens `ids` that follows the block of `key`."""
    return _hash(key + struct.pack(f"<{len(ids)}I", *ids))


def tail_keys(key: bytes, ids: Sequence[int]) -> list[bytes]:
    """Keys of the tails ``ids[:1]``, ``ids[:2]``, ... that follow the block of `key`."""
    state = hashlib.blake2b(key, digest_size=KEY_BYTES)
    keys = []
    for token in ids:
        state.update(struct.pack("<I", token))
        keys.append(state.digest())
    return keys


def node_keys(node: Node, first: bytes) -> list[bytes]:
    """The key of each block of a tree node, hashed where it was not asked for before.

    Args:
        node: not the tree's root.
        first: `root_key` of the tree; a private root has one of its own.
    """
    chain = []
    at: Node | None = node
    while at is not None and at.parent is not None and len(at.record_keys) < len(at.blocks):
        chain.append(at)
        at = at.parent
    for each in reversed(chain):
        if not each.record_keys:
            parent = each.parent
            assert parent is not None
            key = parent.record_keys[-1] if parent.record_keys else first
        else:
            key = each.record_keys[-1]
        for ids in each.keys[len(each.record_keys) :]:
            key = next_key(key, ids)
            each.record_keys.append(key)
    return node.record_keys


def end_key(node: Node, first: bytes) -> bytes:
    """The key of a node's last block; `first` for the tree's root, its own for a private one."""
    if node.parent is None:
        return node.record_keys[-1] if node.record_keys else first
    return node_keys(node, first)[-1]


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=KEY_BYTES).digest()
