"""Turns an attention plan into tiles: padded batches of like groups, as index tensors.

Done once a step and used by every layer. Everything here is numpy over whole arrays but for one
loop over groups that adds a few integers: a plan of 300 groups takes well under a millisecond.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from cotrt.plan import AttentionPlan, Int32

Array = npt.NDArray[np.int64]

# Padding that is cheaper than one more call of the attention op, measured on two cores: gathered
# tokens, and row x token products.
SLACK_TOKENS = 256
SLACK_WORK = 4096
# Gathered tokens of a tile of more than one group: more would leave the processor's caches.
MAX_TOKENS = 8192
# A tile that needs a mask of its own for each row is kept below this many mask elements.
MAX_ROW_MASK = 1 << 20


@dataclass(slots=True)
class Tile:
    """N groups padded to M rows and L tokens, attended to in one call.

    Attributes:
        blocks: int64 ``[N * B]`` block ids; a shorter group repeats its last block.
        rows: int64 ``[N * M]`` rows of q; a smaller group repeats its last row.
        num_groups: N.
        num_rows: M.
        length: L, at most ``B * block_size``: gathered slots past it are cut off.
        pad: int64 ``([K], [K])`` (group, slot) of gathered slots below L that are not the
            group's, to be zeroed (they may hold NaN); None when there are none.
        mask: float32 ``[N, 1, 1 or M, L]``, 0 where seen and -inf where not; None: all is seen.
        diagonal: the one group's row m sees exactly its tokens 0..m (a fresh prompt).
        blind: int64 flat (group, row) indices of rows that see nothing of their group, or None.
        row_masks: the mask repeated over the query heads of a KV head, by their number.
    """

    blocks: torch.Tensor
    rows: torch.Tensor
    num_groups: int
    num_rows: int
    length: int
    pad: tuple[torch.Tensor, torch.Tensor] | None = None
    mask: torch.Tensor | None = None
    diagonal: bool = False
    blind: torch.Tensor | None = None
    row_masks: dict[int, torch.Tensor] = field(default_factory=dict)

    def folded_mask(self, heads: int) -> torch.Tensor | None:
        """The mask for rows that are (row, query head) pairs: ``[N, 1, 1 or M * heads, L]``."""
        if self.mask is None or self.mask.shape[2] == 1 or heads == 1:
            return self.mask
        if heads not in self.row_masks:
            self.row_masks[heads] = self.mask.repeat_interleave(heads, dim=2)
        return self.row_masks[heads]


@dataclass(slots=True)
class PreparedPlan:
    """Tiles, and where each row's results are among theirs.

    Result ``i`` is row ``i`` of the tiles' results laid end to end (``N * M`` each), followed by
    ``num_blind`` results of weight 0.

    Attributes:
        num_rows: T.
        tiles: what to compute.
        num_blind: results of groups that none of their rows sees.
        lone_rows: int64 ``[A]`` rows with one result; None when that is all rows, in order.
        lone_results: int64 ``[A]`` their results.
        merged_rows: int64 ``[B]`` rows with more than one result.
        merged_results: int64 ``[B, depth]`` their results from root to leaf.
        merged_pad: bool ``[B, depth]`` true where a row has fewer.
    """

    num_rows: int
    tiles: list[Tile]
    num_blind: int
    lone_rows: torch.Tensor | None
    lone_results: torch.Tensor
    merged_rows: torch.Tensor
    merged_results: torch.Tensor
    merged_pad: torch.Tensor


def prepare_plan(plan: AttentionPlan, device: str | torch.device) -> PreparedPlan:
    """Makes the index tensors of a step.

    Args:
        plan: any valid plan.
        device: where q and the caches live.
    """
    return _Preparer(plan, device).prepare()


class _Preparer:
    def __init__(self, plan: AttentionPlan, device: str | torch.device) -> None:
        self.plan = plan
        self.device = device
        self.num_rows = np.diff(plan.group_row_offsets)
        self.row_positions = plan.query_positions[plan.group_rows]
        first, last = _bounds(self.row_positions, plan.group_row_offsets)
        causal = plan.group_causal != 0
        # What any row of the group sees at all; causal groups may hold tokens past every row.
        seen = np.minimum(plan.group_len, last - plan.group_start + 1).clip(min=0)
        self.length = np.where(causal, seen, plan.group_len).astype(np.int64)
        self.masked = causal & (first < plan.group_start + self.length - 1)
        self.num_blocks = -(-self.length // plan.block_size)
        self.result_of_slot = np.full(len(plan.group_rows), -1, np.int64)
        self.num_results = 0

    def prepare(self) -> PreparedPlan:
        plan = self.plan
        used = self.num_rows > 0
        tiles = [
            self._tile(groups) for groups in self._batches((used & (self.length > 0)).nonzero()[0])
        ]
        num_blind = self._place_blind((used & (self.length == 0)).nonzero()[0])

        counts = np.diff(plan.row_partial_offsets)
        assert (counts > 0).all(), "a row that is in no group"
        first = plan.row_partial_offsets[:-1]
        lone = counts == 1
        lone_rows = lone.nonzero()[0]
        slots = plan.row_partials[first[lone]]
        slot_of_row = np.zeros(plan.num_rows, np.int64)
        slot_of_row[plan.group_rows] = np.arange(len(plan.group_rows))
        lone_results = self.result_of_slot[np.where(slots < 0, slot_of_row[lone], slots)]

        merged = (~lone).nonzero()[0]
        depth = int(counts.max(initial=1))
        step = np.arange(depth)
        at = first[merged, None] + np.minimum(step, counts[merged, None] - 1)
        merged_results = self.result_of_slot[plan.row_partials[at]]
        return PreparedPlan(
            num_rows=plan.num_rows,
            tiles=tiles,
            num_blind=num_blind,
            lone_rows=None if len(lone_rows) == plan.num_rows else self._tensor(lone_rows),
            lone_results=self._tensor(lone_results),
            merged_rows=self._tensor(merged),
            merged_results=self._tensor(merged_results),
            merged_pad=torch.from_numpy(step >= counts[merged, None]).to(self.device),
        )

    def _batches(self, groups: Array) -> list[Array]:
        """Cuts groups, sorted by shape, into runs that cost little padding."""
        order = groups[np.lexsort((self.num_blocks[groups], self.num_rows[groups]))]
        rows, tokens = (
            self.num_rows[order].tolist(),
            (self.num_blocks[order] * self.plan.block_size).tolist(),
        )
        masked = self.masked[order].tolist()
        batches: list[Array] = []
        begin = real_tokens = real_work = width = length = 0
        row_mask = False
        for i, (m, n, has_mask) in enumerate(zip(rows, tokens, masked, strict=True)):
            count = i - begin + 1
            wide, long = max(width, m), max(length, n)
            sum_tokens, sum_work = real_tokens + n, real_work + m * n
            fits = (
                count * long <= min(sum_tokens + sum_tokens // 4 + SLACK_TOKENS, MAX_TOKENS)
                and count * wide * long <= sum_work + sum_work // 4 + SLACK_WORK
                and not ((row_mask or has_mask) and count * wide * long > MAX_ROW_MASK)
            )
            if count > 1 and not fits:
                batches.append(order[begin:i])
                begin, wide, long, sum_tokens, sum_work = i, m, n, n, m * n
                row_mask = False
            real_tokens, real_work, width, length = sum_tokens, sum_work, wide, long
            row_mask = row_mask or has_mask
        if len(order):
            batches.append(order[begin:])
        return batches

    def _tile(self, groups: Array) -> Tile:
        plan = self.plan
        num_groups, num_rows = len(groups), int(self.num_rows[groups].max())
        lengths = self.length[groups]
        length, num_blocks = int(lengths.max()), int(self.num_blocks[groups].max())
        block = np.minimum(np.arange(num_blocks), self.num_blocks[groups, None] - 1)
        blocks = plan.group_blocks[plan.group_block_offsets[groups, None] + block]
        row = np.minimum(np.arange(num_rows), self.num_rows[groups, None] - 1)
        slots = plan.group_row_offsets[groups, None] + row
        # A repeated row has the same inputs as the row that it repeats: any of them may be named.
        results = self.num_results + np.arange(num_groups * num_rows)
        self.result_of_slot[slots.ravel()] = results
        self.num_results += num_groups * num_rows
        tile = Tile(
            blocks=self._tensor(blocks.ravel()),
            rows=self._tensor(plan.group_rows[slots].ravel()),
            num_groups=num_groups,
            num_rows=num_rows,
            length=length,
        )
        inside = np.arange(length) < lengths[:, None]
        if not inside.all():
            group, slot = (~inside).nonzero()
            tile.pad = self._tensor(group), self._tensor(slot)
        if self.masked[groups].any():
            self._mask_rows(tile, groups, slots, inside)
        elif tile.pad is not None:
            tile.mask = self._additive(inside[:, None, None, :])
        return tile

    def _mask_rows(
        self, tile: Tile, groups: Array, slots: Array, inside: npt.NDArray[np.bool_]
    ) -> None:
        causal = self.plan.group_causal[groups, None] != 0
        # Tokens of the run up to the row's own position, the row itself counted.
        reach = self.row_positions[slots] - self.plan.group_start[groups, None] + 1
        if tile.num_groups == 1 and (reach[0] == np.arange(1, tile.num_rows + 1)).all():
            tile.diagonal = True
            return
        reach = np.where(causal, reach, tile.length)
        seen = inside[:, None, :] & (np.arange(tile.length) < reach[:, :, None])
        tile.mask = self._additive(seen[:, None])
        if (reach <= 0).any():
            tile.blind = self._tensor((reach <= 0).ravel().nonzero()[0])

    def _place_blind(self, groups: Array) -> int:
        before = self.num_results
        for group in groups:
            begin, end = self.plan.group_row_offsets[group : group + 2]
            self.result_of_slot[begin:end] = self.num_results + np.arange(end - begin)
            self.num_results += int(end - begin)
        return self.num_results - before

    def _additive(self, seen: npt.NDArray[np.bool_]) -> torch.Tensor:
        mask = torch.zeros(seen.shape, dtype=torch.float32)
        return mask.masked_fill_(torch.from_numpy(~seen), -torch.inf).to(self.device)

    def _tensor(self, array: npt.NDArray[np.integer]) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self.device)


def _bounds(positions: Int32, offsets: Int32) -> tuple[Array, Array]:
    """Smallest and largest position of each group's rows; (0, -1) of an empty one."""
    first = np.zeros(len(offsets) - 1, np.int64)
    last = np.full(len(offsets) - 1, -1, np.int64)
    used = (np.diff(offsets) > 0).nonzero()[0]
    if len(used):
        first[used] = np.minimum.reduceat(positions, offsets[used])
        last[used] = np.maximum.reduceat(positions, offsets[used])
    return first, last
