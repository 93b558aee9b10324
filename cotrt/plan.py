"""Frozen arrays that pass between the rooms. No torch here.

A step has T rows (one a token computed in it), R logits rows and S sample rows:

    row          one token whose hidden state is computed: its id, position and KV slot
    logits row   a row whose hidden state goes through the head
    sample row   one draw from a logits row; siblings that sample next share one logits row
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
UInt8 = npt.NDArray[np.uint8]

_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "int32": 4}


@dataclass(frozen=True, slots=True)
class KVShape:
    """The plain layout of *records*: the KV of up to one block, outside of the device's pool.

    A record is bytes, ``[layer][K or V][token][head][dim]``, native byte order, the same for every
    backend, in host memory, on disk and in saved branches. A record of k tokens has k times
    `token_bytes` bytes.

    Attributes:
        num_layers: layers; num_kinds: 2, K and V (1 where a model has no more than one).
        num_heads: KV heads; head_dim: elements a head.
        dtype: of an element: "bfloat16", "float16", "float32" or "int32".
    """

    num_layers: int
    num_kinds: int
    num_heads: int
    head_dim: int
    dtype: str

    @property
    def token_bytes(self) -> int:
        """Bytes of one token, all layers."""
        return self.num_layers * self.num_kinds * self._row_bytes

    @property
    def _row_bytes(self) -> int:
        return self.num_heads * self.head_dim * _ITEM_BYTES[self.dtype]

    def _by_token(self, record: UInt8) -> UInt8:
        """``[layers * kinds, tokens, bytes]`` of a record."""
        return record.reshape(self.num_layers * self.num_kinds, -1, self._row_bytes)

    def cut(self, record: UInt8, start: int, stop: int) -> UInt8:
        """The record of tokens `start` to `stop` of those in `record`."""
        return np.ascontiguousarray(self._by_token(record)[:, start:stop]).reshape(-1)

    def join(self, records: Sequence[UInt8]) -> UInt8:
        """One record of the tokens of all, in their order."""
        return np.concatenate([self._by_token(r) for r in records], axis=1).reshape(-1)

    def pad(self, record: UInt8, num_tokens: int) -> UInt8:
        """The record with zero tokens at its end, `num_tokens` in all."""
        missing = num_tokens * self.token_bytes - record.size
        if not missing:
            return record
        return self.join([record, np.zeros(missing, np.uint8)])


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The work list of tree attention: G groups, each a run of KV blocks and the rows reading it.

    A run of blocks may be longer than ``group_len`` needs: entries past
    ``ceil(group_len / block_size)`` are spare and never read. Slots past ``group_len`` in the
    last block are never read either, whatever they hold.

    Partial slot ``s`` is index ``s`` into ``group_rows``. A row whose partials are ``[-1]`` is in
    exactly one group and is written straight to the output; every other row names its partials
    from root to leaf, to be merged by log-sum-exp in that order.

    Attributes:
        block_size: tokens a block.
        query_positions: ``[T]`` absolute position of each row.
        group_blocks: ``[sum of run lengths]`` block ids, run after run.
        group_block_offsets: ``[G + 1]`` where each run begins in ``group_blocks``.
        group_start: ``[G]`` absolute position of the first token of the run.
        group_len: ``[G]`` valid tokens in the run.
        group_rows: ``[P]`` row indices, group after group.
        group_row_offsets: ``[G + 1]`` where each group begins in ``group_rows``.
        group_causal: ``[G]`` 1 where a row sees positions up to its own only, 0 where all.
        row_partials: ``[...]`` partial slots, row after row, root to leaf; -1 for a lone group.
        row_partial_offsets: ``[T + 1]`` where each row begins in ``row_partials``.
        chunk_tokens: 0, or in a deterministic plan 256: a group begins at a multiple of it, and
            only one that begins at 0 is longer. Every chunk then has a result of its own, and a
            row's are added up from root to leaf, within a group and in the merge alike, so that
            a row's bits depend on the keys that it sees and on nothing else.
    """

    block_size: int
    query_positions: Int32
    group_blocks: Int32
    group_block_offsets: Int32
    group_start: Int32
    group_len: Int32
    group_rows: Int32
    group_row_offsets: Int32
    group_causal: Int32
    row_partials: Int32
    row_partial_offsets: Int32
    chunk_tokens: int = 0

    @property
    def num_groups(self) -> int:
        return len(self.group_len)

    @property
    def num_rows(self) -> int:
        return len(self.query_positions)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Everything that the model runner needs for one step.

    Attributes:
        input_ids: ``[T]`` token ids.
        positions: ``[T]`` absolute positions.
        slot_mapping: ``[T]`` ``block_id * block_size + offset`` where the row's K and V go; -1
            where they are there already (the row is computed for its logits alone).
        copies: ``[(source block, destination block)]``, done before the rows are written, as if
            all sources were read first.
        stores: ``[(block, key, tokens)]`` whose first tokens become the record of that key, done
            before anything is written.
        loads: ``[(key, block, tokens)]`` records that are put into blocks, done after the copies.
        attention: the attention work list over the same T rows.
        logits_rows: ``[R]`` indices of rows that go through the head.
        sample_rows: ``[S]`` index into ``logits_rows`` of each draw.
        scored_rows: ``[K]`` index into ``logits_rows`` of each given token that is scored.
        scored_tokens: ``[K]`` the token whose log-probability is wanted there.
    """

    input_ids: Int32
    positions: Int32
    slot_mapping: Int64
    copies: tuple[tuple[int, int], ...]
    attention: AttentionPlan
    logits_rows: Int32
    sample_rows: Int32
    scored_rows: Int32 = field(default_factory=lambda: np.zeros(0, np.int32))
    scored_tokens: Int32 = field(default_factory=lambda: np.zeros(0, np.int32))
    stores: tuple[tuple[int, bytes, int], ...] = ()
    loads: tuple[tuple[bytes, int, int], ...] = ()
