"""The host tier: records in host memory beside the pool of a device, the least used given up."""

from __future__ import annotations

import collections
from collections.abc import Callable

import numpy as np

from cotrt.plan import UInt8

# The buffer is taken from the system in slabs of about this size, as it fills: pinning all of it
# at once would stop a step for a second.
_SLAB_BYTES = 256 << 20

Spill = Callable[[bytes, int, UInt8], None]


class HostStore:
    """Records by key in slots of one size; a full store gives up the one used longest ago.

    A record that was loaded is the next to go: the device has it, and when it is evicted there
    while it is still here, nothing has to be copied.

    Args:
        capacity: slots.
        record_bytes: of a record of a whole block.
        pinned: page-locked memory, for a CUDA device.
        spill: called with key, tokens and record of what is given up and was not loaded.

    Laws: every slot is free or has one key; used and free slots together are those of the slabs.
    """

    def __init__(
        self, capacity: int, record_bytes: int, *, pinned: bool = False, spill: Spill | None = None
    ) -> None:
        assert capacity > 0
        self.capacity = capacity
        self.num_tails = 0
        self._record_bytes = record_bytes
        self._pinned = pinned
        self._spill = spill
        self._per_slab = min(capacity, max(1, _SLAB_BYTES // record_bytes))
        self._slabs: list[UInt8] = []
        self._free: list[int] = []
        # key -> (slot, bytes, tokens), the next to go first
        self._slots: collections.OrderedDict[bytes, tuple[int, int, int]] = (
            collections.OrderedDict()
        )
        self._loaded: set[bytes] = set()

    def __contains__(self, key: bytes) -> bool:
        return key in self._slots

    def __len__(self) -> int:
        return len(self._slots)

    def put(self, key: bytes, num_tokens: int, record: UInt8) -> None:
        """Keep a copy of a record."""
        if key in self._slots:
            self.touch(key)
            return
        slot = self._take_slot()
        self._view(slot)[: record.size] = record
        self._slots[key] = (slot, record.size, num_tokens)
        self.num_tails += record.size < self._record_bytes

    def get(self, key: bytes) -> UInt8 | None:
        """The record: a view that the next `put` may change."""
        found = self._slots.get(key)
        if found is None:
            return None
        return self._view(found[0])[: found[1]]

    def touch(self, key: bytes) -> None:
        """The device has given the record up: it stays here longest."""
        self._loaded.discard(key)
        self._slots.move_to_end(key)

    def note_loaded(self, key: bytes) -> None:
        """The device has the record: it goes first here."""
        if key in self._slots:
            self._loaded.add(key)
            self._slots.move_to_end(key, last=False)

    def _view(self, slot: int) -> UInt8:
        slab, index = divmod(slot, self._per_slab)
        view: UInt8 = self._slabs[slab][index]
        return view

    def _take_slot(self) -> int:
        if not self._free:
            have = len(self._slabs) * self._per_slab
            count = min(self._per_slab, self.capacity - have)
            if count <= 0:
                self._give_up_one()
            else:
                self._slabs.append(self._new_slab(count))
                self._free.extend(range(have + count - 1, have - 1, -1))
        return self._free.pop()

    def _new_slab(self, count: int) -> UInt8:
        shape = (count, self._record_bytes)
        if not self._pinned:
            return np.empty(shape, np.uint8)
        import torch

        slab: UInt8 = torch.empty(shape, dtype=torch.uint8, pin_memory=True).numpy()
        return slab

    def _give_up_one(self) -> None:
        key, (slot, size, num_tokens) = self._slots.popitem(last=False)
        if key in self._loaded:
            self._loaded.discard(key)
        elif self._spill is not None:
            self._spill(key, num_tokens, self._view(slot)[:size])
        self.num_tails -= size < self._record_bytes
        self._free.append(slot)

    def check_invariants(self) -> None:
        """Raise AssertionError unless every slot is free or has exactly one key."""
        slots = [slot for slot, _, _ in self._slots.values()]
        have = min(self.capacity, len(self._slabs) * self._per_slab)
        assert sorted(slots + self._free) == list(range(have)), "a host slot was lost or is double"
        assert self._loaded <= set(self._slots), "a loaded record is not there"
        tails = sum(size < self._record_bytes for _, size, _ in self._slots.values())
        assert tails == self.num_tails, f"num_tails {self.num_tails}, counted {tails}"
