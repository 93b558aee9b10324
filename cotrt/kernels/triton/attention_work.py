"""A plan as the GPU reads it: items, slots and the merge order in one buffer of fixed capacity.

All of it is int32 in one tensor, so that a step costs one copy to the device, and the counts are
in it too, so that a captured CUDA graph replays whatever plan was last written:

    counts | items | slot rows | slot partials | positions | merge rows, offsets, order | block ids

An item is a part of one group's rows that fills one tile. Items stand by falling cost.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch

from cotrt.plan import AttentionPlan, Int32, Int64

from .attention_kernel import ITEM_FIELDS
from .attention_variants import TILES, low_tile
from .launch import next_power_of_2

_COUNTS = 16  # items, merge rows; the rest keeps what follows aligned


@dataclass(frozen=True, slots=True)
class Capacity:
    """How much a work list can hold; each is a capacity class (see `Capacity.holding`).

    Attributes:
        rows: query rows of a step.
        slots: (group, row) pairs.
        items: tiles.
        entries: block ids of all runs, spare ones included.
    """

    rows: int
    slots: int
    items: int
    entries: int

    @classmethod
    def holding(cls, rows: int, slots: int, items: int, entries: int) -> Capacity:
        """The smallest capacity class: each a power of two, at least 64."""
        return cls(*(max(64, 1 << (n - 1).bit_length()) for n in (rows, slots, items, entries)))

    def can_hold(self, other: Capacity) -> bool:
        """Whether a work list of this capacity can hold what ``other`` can."""
        return all(getattr(self, f.name) >= getattr(other, f.name) for f in fields(self))


@dataclass(frozen=True, slots=True)
class _Items:
    """Host arrays of a plan, before they are written to a buffer."""

    items: Int32  # [items, ITEM_FIELDS]
    slot_partials: Int32  # [slots]
    merge_rows: Int32
    merge_offsets: Int32
    merge_partials: Int32


class AttentionWork:
    """The work list on a device, for one number of heads a KV head and one high tile.

    Laws: no slot, entry or row past a plan's own is ever read, so what lies there does not
    matter; ``write`` never allocates on the device.

    Args:
        capacity: what it can hold.
        heads_per_kv: query heads of one KV head.
        high_tile: rows of the tile for large groups.
        device: where it lives.
        one_tile: that tile is for small groups too.
    """

    def __init__(
        self,
        capacity: Capacity,
        heads_per_kv: int,
        high_tile: int,
        device: torch.device,
        *,
        one_tile: bool = False,
    ) -> None:
        assert high_tile in TILES and high_tile >= low_tile(heads_per_kv)
        self.capacity = capacity
        self.heads_per_kv = heads_per_kv
        self.high_tile = high_tile
        self.low_tile = high_tile if one_tile else low_tile(heads_per_kv)
        self.num_rows = 0
        self.num_items = 0
        self.num_merge_rows = 0
        self.num_partials = 0
        sizes = (
            _COUNTS,
            capacity.items * ITEM_FIELDS,
            capacity.slots,
            capacity.slots,
            capacity.rows,
            capacity.rows,
            capacity.rows + 16,
            capacity.slots,
            capacity.entries,  # last: only as many as there are are copied
        )
        self._offsets = [0, *np.cumsum(sizes).tolist()]
        self._data = torch.empty(self._offsets[-1], dtype=torch.int32, device=device)
        (
            self.counts,
            self.items,
            self.slot_rows,
            self.slot_partials,
            self.positions,
            self.merge_rows,
            self.merge_offsets,
            self.merge_partials,
            self.entries,
        ) = (self._data[a:b] for a, b in zip(self._offsets, self._offsets[1:], strict=False))
        self.counts.zero_()  # no work until a plan is written

    def write(self, plan: AttentionPlan) -> None:
        """Put ``plan`` in place of what is there: one copy, in the order of the current stream."""
        made = _make_items(plan, self.heads_per_kv, self.high_tile, self.low_tile)
        needs = Capacity(
            plan.num_rows, len(plan.group_rows), len(made.items), len(plan.group_blocks)
        )
        assert self.capacity.can_hold(needs), (self.capacity, needs)
        self.num_rows = plan.num_rows
        self.num_items = len(made.items)
        self.num_merge_rows = len(made.merge_rows)
        self.num_partials = len(made.merge_partials)
        counts = np.array([self.num_items, self.num_merge_rows], np.int32)
        on_gpu = self._data.device.type == "cuda"
        used = self._offsets[-2] + len(plan.group_blocks)
        # Pinned memory is fresh each time: torch gives it out again only when the copy is done.
        host = torch.empty(used, dtype=torch.int32, pin_memory=on_gpu)
        view = host.numpy()
        parts = (
            counts,
            made.items.reshape(-1),
            plan.group_rows,
            made.slot_partials,
            plan.query_positions,
            made.merge_rows,
            made.merge_offsets,
            made.merge_partials,
            plan.group_blocks,
        )
        for offset, part in zip(self._offsets, parts, strict=False):
            view[offset : offset + len(part)] = part
        self._data[:used].copy_(host, non_blocking=on_gpu)


def capacity_for(
    plan: AttentionPlan, heads_per_kv: int, high_tile: int, low: int | None = None
) -> Capacity:
    """The capacity class that holds ``plan``; its low tile, where it is not `low_tile`'s."""
    counts = np.diff(plan.group_row_offsets)
    items = int(_tiles(counts, heads_per_kv, high_tile, low).sum())
    return Capacity.holding(
        plan.num_rows, len(plan.group_rows), max(items, 1), max(len(plan.group_blocks), 1)
    )


def choose_high_tile(plan: AttentionPlan, heads_per_kv: int, largest: int) -> int:
    """The high tile for ``plan``: the smallest that holds its largest group, up to ``largest``.

    128 only where most of the work is prefill: its registers would be missing in the low tile,
    which decodes in the same launch.
    """
    low = low_tile(heads_per_kv)
    counts = np.diff(plan.group_row_offsets).astype(np.int64) * next_power_of_2(heads_per_kv)
    rows = min(int(counts.max(initial=1)), largest)
    fitting = next(tile for tile in TILES if tile >= max(low, rows))
    if fitting < 128 or low == 128:
        return fitting
    # Score elements computed: a tile of rows times a token.
    length = plan.group_len.astype(np.int64)
    large = counts > 64
    by_large = int((length * counts)[large].sum())
    by_small = int(length[~large].sum()) * 64
    return 128 if by_large > 4 * by_small else 64


def _tiles(row_counts: Int32 | Int64, heads_per_kv: int, high_tile: int, low: int | None) -> Int64:
    """How many items each group has."""
    low_rows, high_rows = _rows_of_tiles(heads_per_kv, high_tile, low)
    per_item = np.where(row_counts > low_rows, high_rows, low_rows)
    tiles: Int64 = -(-row_counts.astype(np.int64) // per_item)
    return tiles


def _rows_of_tiles(heads_per_kv: int, high_tile: int, low: int | None) -> tuple[int, int]:
    """Query rows that the low and the high tile hold."""
    heads = next_power_of_2(heads_per_kv)
    return (low or low_tile(heads_per_kv)) // heads, high_tile // heads


def _make_items(
    plan: AttentionPlan, heads_per_kv: int, high_tile: int, low: int | None = None
) -> _Items:
    low_rows, high_rows = _rows_of_tiles(heads_per_kv, high_tile, low)
    row_counts = np.diff(plan.group_row_offsets).astype(np.int64)
    tiles = _tiles(row_counts, heads_per_kv, high_tile, low)
    group = np.repeat(np.arange(plan.num_groups), tiles)
    place = np.arange(len(group)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    per_item = np.where(row_counts > low_rows, high_rows, low_rows)[group]
    first = place * per_item
    rows = np.minimum(row_counts[group] - first, per_item)
    first += plan.group_row_offsets[group]
    # What is left of a large group may fit the low tile.
    high = (rows > low_rows) & (high_rows > low_rows)

    # Slots that are partials are numbered on their own: the others need no room.
    offsets = plan.row_partial_offsets
    starts = offsets[:-1].astype(np.int64)
    merges = plan.row_partials[starts] >= 0
    merge_rows = np.flatnonzero(merges)
    slots = plan.row_partials[plan.row_partials >= 0]
    slot_partials = np.full(len(plan.group_rows), -1, np.int32)
    slot_partials[slots] = np.arange(len(slots), dtype=np.int32)
    merge_counts = np.diff(offsets)[merges]
    # In row order, partial p of the merge order is simply partial p.
    merge_partials = np.arange(len(slots), dtype=np.int32)

    length = plan.group_len[group].astype(np.int64)
    causal = plan.group_causal[group]
    last_position = plan.query_positions[plan.group_rows[first + rows - 1]]
    seen = np.where(
        causal != 0, np.minimum(length, last_position - plan.group_start[group] + 1), length
    )
    is_partial = slot_partials >= 0
    if len(group):
        bounds = np.cumsum(np.concatenate((np.zeros(1, np.int64), is_partial.astype(np.int64))))
        num_partials = bounds[first + rows] - bounds[first]
        output = (num_partials < rows) * 1 + (num_partials > 0) * 2
    else:
        output = np.zeros(0, np.int64)
    items = np.stack(
        (
            plan.group_block_offsets[group],
            length,
            plan.group_start[group],
            first,
            rows,
            high,
            causal,
            output,
        ),
        axis=1,
    ).astype(np.int32)
    order = np.argsort(-(seen * np.where(high, 2, 1)), kind="stable")
    return _Items(
        items=np.ascontiguousarray(items[order]),
        slot_partials=slot_partials,
        merge_rows=merge_rows.astype(np.int32),
        merge_offsets=np.concatenate((np.zeros(1, np.int64), np.cumsum(merge_counts))).astype(
            np.int32
        ),
        merge_partials=merge_partials,
    )
