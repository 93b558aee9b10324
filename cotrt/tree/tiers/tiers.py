"""Memory tiers: KV that leaves the pool is kept as records, and comes back instead of computing.

Below the pool lie stores of records by key (see record_keys.py): host memory, disk, and read-only
sources such as a saved branch. When a cached block is evicted, or the private tail of an idle or
preempted sequence is given up, its KV is stored or dropped, as the costs say; what was pruned is
dropped. A work whose next tokens have records *loads* them in place of computing:

    evict, release ─> stores of the next step, carried out before that step writes anything
    admit ─> find: a Load, its records in order ─> read in the background ─> loads of a step

Loads count against a budget of bytes a step, as rows count against one of tokens. What a step has
loaded is seen by others after that step, as computed KV is. A record that cannot be read is
forgotten, and its tokens are computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from cotrt.tree.sequence import Sequence
from cotrt.tree.tiers.record_keys import end_key, next_key, node_keys, tail_keys
from cotrt.tree.tiers.tier_costs import TierCosts

if TYPE_CHECKING:
    from cotrt.tree.kv_tree import KVTree
    from cotrt.tree.node import Node

Store = tuple[int, bytes, int]  # block, key, tokens
# Reads run ahead of the steps that need them by so many bytes.
_READAHEAD_BYTES = 32 << 20
# A step takes in what the tier gives in this time; a step with nothing else to do, more.
_STEP_SECONDS = 0.01
_IDLE_FACTOR = 8
_FIRST_STEP_BYTES = 8 << 20
# A read that has brought nothing for so long, or for as long as computing takes, is given up.
_PATIENCE = 0.1
_LOOK_SECONDS = 0.05
# Records of KV that is found in the pool are said to be used so often.
_NOTE_SECONDS = 30.0


class Records(Protocol):
    """Where records lie; the engine's `RecordStores` is one."""

    @property
    def has_tails(self) -> bool:
        """A record of fewer tokens than a block may be among them."""

    def where(self, key: bytes) -> str | None:
        """The tier that has a record: "host", "disk" or "source"; None without one."""

    def tier_for(self, num_bytes: int) -> str | None:
        """The tier that would take `num_bytes` more now, those not yet carried out included."""

    def touch(self, key: bytes) -> None:
        """A record would have been stored again: it was used."""

    def request(self, keys: SequenceABC[bytes]) -> None:
        """Begin to read records; those that are asked for already are left alone."""

    def is_ready(self, key: bytes) -> bool:
        """A step can load the record without waiting (or learn that it cannot be read)."""


@dataclass(slots=True, eq=False)
class Load:
    """Records that a work's next tokens have, in order of position.

    Attributes:
        keys, sizes: of each record its key and its tokens; all but the last are whole blocks.
        at: the first that is not loaded yet; start: absolute position of its first token.
        end: absolute position after the last.
        looked: when it was last looked whether a record is ready; waited: seconds it was not.
    """

    keys: list[bytes]
    sizes: list[int]
    start: int
    end: int
    looked: float
    at: int = 0
    waited: float = 0.0

    @property
    def tokens_left(self) -> int:
        return self.end - self.start


@dataclass(slots=True)
class TierCounters:
    """What the tiers did."""

    stored_blocks: int = 0
    loaded_blocks: int = 0
    loaded_tokens: int = 0
    failed_loads: int = 0


@dataclass(slots=True)
class Tiers:
    """What moves to the tiers and back.

    Args:
        records: where records lie.
        costs: moving against computing.
        first_key: key before the first block (`record_keys.root_key`).
        block_size: tokens a block; token_bytes: bytes of a token's KV.
        keep_sealed: store every block that is sealed and not pruned, not only what is evicted,
            and keep the records of what is found in the pool: the prefix cache outlives the
            process.
        clock: monotonic seconds.

    Laws: a block whose store is planned is not written before the step that carries it out; an
    unsaved block is sealed, and its key is that of its path.
    """

    records: Records
    costs: TierCosts
    first_key: bytes
    block_size: int
    token_bytes: int
    keep_sealed: bool = False
    clock: Callable[[], float] = time.monotonic
    counters: TierCounters = field(default_factory=TierCounters)
    _planned: dict[bytes, tuple[int, int]] = field(default_factory=dict)  # key -> block, tokens
    _planned_bytes: int = 0
    _storing: set[bytes] = field(default_factory=set)  # of steps that are not committed yet
    _unsaved: dict[int, bytes] = field(default_factory=dict)  # sealed block -> key

    # ---- out ----------------------------------------------------------------------------------

    def evicting(self, node: Node) -> None:
        """The last block of a cached node, which was not pruned, is about to be free."""
        block = node.blocks[-1]
        self._unsaved.pop(block, None)
        self._plan(node_keys(node, self.first_key)[-1], block, self.block_size)

    def releasing(self, seq: Sequence, uncopied: Mapping[int, int]) -> None:
        """`seq` is about to give up its KV for others: its tail is stored.

        Whole blocks are when they are evicted. A tail that others hold too stays theirs, but soon
        they may write on.

        Args:
            uncopied: the tree's; a step's stores come before its copies.
        """
        seq.num_restorable = max(seq.num_restorable, seq.num_computed)
        if seq.private_len:
            ids = seq.span.slice_ids(seq.node.end, seq.num_computed)
            key = next_key(end_key(seq.node, self.first_key), ids)
            self._plan(key, uncopied.get(seq.private[0], seq.private[0]), seq.private_len)

    def sealed(self, node: Node) -> None:
        """The last block of a node has just been sealed."""
        if self.keep_sealed:
            self._unsaved[node.blocks[-1]] = node_keys(node, self.first_key)[-1]

    def matched(self, node: Node, before: Node) -> None:
        """KV was found in the pool, that of the path from the end of `before` to that of `node`.

        So its records are in use, and what is of them no more is stored again; each node's now and
        then.
        """
        if not self.keep_sealed:
            return
        now = self.clock()
        while node is not before:
            if now - node.noted >= _NOTE_SECONDS:
                node.noted = now
                keys = node_keys(node, self.first_key)
                self._unsaved.update(zip(node.blocks, keys, strict=True))
            assert node.parent is not None
            node = node.parent

    def pruned(self, blocks: SequenceABC[int]) -> None:
        """These sealed blocks have lost their last holder by a prune."""
        if self._unsaved:
            for block in blocks:
                self._unsaved.pop(block, None)

    def _plan(self, key: bytes, block: int, num_tokens: int) -> None:
        if self._is_on_its_way(key):
            return
        if self.records.where(key) is not None:
            self.records.touch(key)
            return
        size = num_tokens * self.token_bytes
        tier = self.records.tier_for(self._planned_bytes + size)
        if tier is not None and self.costs.should_store(tier, num_tokens, size):
            self._planned[key] = (block, num_tokens)
            self._planned_bytes += size

    def planned_block(self, key: bytes) -> int | None:
        """The block whose KV a step to come stores under this key; nobody writes it before."""
        planned = self._planned.get(key)
        return None if planned is None else planned[0]

    def _is_on_its_way(self, key: bytes) -> bool:
        return key in self._planned or key in self._storing

    def _where(self, key: bytes) -> str | None:
        found = self.records.where(key)
        if found is None and self._is_on_its_way(key):
            return self.records.tier_for(0)
        return found

    @property
    def has_stores(self) -> bool:
        """There is something that a step with nothing else to do could store."""
        return bool(self._planned) or (
            bool(self._unsaved)
            and self.records.tier_for(self.block_size * self.token_bytes) is not None
        )

    def take_stores(self, *, is_idle: bool = False) -> tuple[Store, ...]:
        """The stores of the step that is being made; of unsaved blocks, some."""
        if self._unsaved:
            self._plan_unsaved(self.step_bytes(is_idle=is_idle))
        if not self._planned:
            return ()
        stores = tuple((block, key, count) for key, (block, count) in self._planned.items())
        self._storing.update(self._planned)
        self._planned.clear()
        self._planned_bytes = 0
        self.counters.stored_blocks += len(stores)
        return stores

    def stored(self, stores: SequenceABC[Store]) -> None:
        """A step has carried these out, or failed to."""
        self._storing.difference_update(key for _, key, _ in stores)

    def _plan_unsaved(self, budget: int) -> None:
        size = self.block_size * self.token_bytes
        while self._unsaved and budget > 0:
            if self.records.tier_for(self._planned_bytes + size) is None:
                return
            block = next(iter(self._unsaved))
            key = self._unsaved.pop(block)
            if self._is_on_its_way(key):
                continue
            if self.records.where(key) is not None:
                self.records.touch(key)
                continue
            self._planned[key] = (block, self.block_size)
            self._planned_bytes += size
            budget -= size

    # ---- in -----------------------------------------------------------------------------------

    def find(self, seq: Sequence, limit: int) -> Load | None:
        """The records of `seq`'s next tokens, up to `limit` of all its tokens; None without any."""
        # The last token is computed in any case, for its logits.
        if limit - seq.num_computed < 2:
            return None
        start = seq.node.end
        keys, sizes = self.look_up(seq, limit)
        end = start + sum(sizes)
        gain = end - seq.num_computed
        tier = self._where(keys[0]) if keys else None
        if tier is None or gain < 2:
            return None
        if not self.costs.should_load(tier, gain, (end - start) * self.token_bytes):
            return None
        return Load(keys, sizes, start, end, self.clock())

    def look_up(self, seq: Sequence, limit: int) -> tuple[list[bytes], list[int]]:
        """Keys and tokens of the records that follow the end of `seq`'s sealed KV without a gap."""
        size, at = self.block_size, seq.node.end
        key = end_key(seq.node, self.first_key)
        keys, sizes = list[bytes](), list[int]()
        while at + size <= limit:
            following = next_key(key, seq.span.slice_ids(at, at + size))
            if self._where(following) is None:
                break
            key = following
            keys.append(key)
            sizes.append(size)
            at += size
        if at < limit and (self.records.has_tails or self._planned or self._storing):
            tails = tail_keys(key, seq.span.slice_ids(at, min(limit, at + size - 1)))
            for count in range(len(tails), 0, -1):
                if self._where(tails[count - 1]) is not None:
                    keys.append(tails[count - 1])
                    sizes.append(count)
                    break
        return keys, sizes

    def num_ready(self, load: Load, budget: int) -> int:
        """Records of `load` that can be loaded now, within `budget` bytes (one at least)."""
        ahead = max(1, _READAHEAD_BYTES // (self.block_size * self.token_bytes))
        keys = load.keys[load.at : load.at + ahead]
        self.records.request([key for key in keys if not self._is_on_its_way(key)])
        count = 0
        for key, size in zip(load.keys[load.at :], load.sizes[load.at :], strict=True):
            budget -= size * self.token_bytes
            if (count and budget < 0) or self._is_on_its_way(key):
                break
            if not self.records.is_ready(key):
                break
            count += 1
        now = self.clock()
        if count == 0:
            # Not the time in which nobody looked, for want of room: another may have taken the
            # record meanwhile, and it is read again from now on.
            load.waited += min(now - load.looked, _LOOK_SECONDS)
        load.looked = now
        return count

    def is_overdue(self, load: Load) -> bool:
        """Waiting for a record has taken longer than computing would."""
        compute = self.costs.compute_seconds(load.tokens_left)
        return load.waited > max(_PATIENCE, compute or 10 * _PATIENCE)

    def loaded(self, load: Load, num_records: int, num_tokens: int) -> None:
        """A step has brought the next `num_records` of `load`."""
        load.at += num_records
        load.start += num_tokens
        load.waited = 0.0
        self.counters.loaded_blocks += num_records
        self.counters.loaded_tokens += num_tokens

    def step_bytes(self, *, is_idle: bool = False) -> int:
        """Bytes that one step moves in, at most (one record at least)."""
        seconds = self.costs.taking_in.value
        budget = int(_STEP_SECONDS / seconds) if seconds else _FIRST_STEP_BYTES
        budget = budget * _IDLE_FACTOR if is_idle else budget
        return max(budget, self.block_size * self.token_bytes)

    # ---- looking inside -----------------------------------------------------------------------

    def location(self, seq: Sequence) -> str | None:
        """Where the KV is that `seq` gave up: the tier of what it needs first, or "device".

        "device" where all that is left of it is cached in the pool; None where nothing is.
        """
        node, at = seq.node, seq.node.end
        key = end_key(node, self.first_key)
        ids = seq.span.slice_ids(at, seq.length)
        size, done, is_cached = self.block_size, 0, False
        while True:  # down what is cached
            child = node.children.get(tuple(ids[done : done + size]))
            if child is None:
                break
            keys = node_keys(child, self.first_key)
            is_cached = True
            for index, block in enumerate(child.keys):
                if block != tuple(ids[done : done + size]):
                    break
                key, done = keys[index], done + size
            if done + at < child.end:
                break
            node = child
        for wanted in reversed(tail_keys(key, ids[done : done + size])):
            found = self._where(wanted)
            if found is not None:
                return "disk" if found == "source" else found
        return "device" if is_cached else None

    def check_invariants(self, tree: KVTree) -> None:
        """Raise AssertionError where a planned or unsaved block is not what it should be."""
        owners = {block: node for node in tree.nodes() for block in node.blocks}
        for block, key in self._unsaved.items():
            node = owners.get(block)
            assert node is not None, f"block {block} is to be saved and is not sealed"
            assert not (node.pruned and not node.num_live), f"pruned block {block} is to be saved"
            assert node_keys(node, self.first_key)[node.blocks.index(block)] == key
        for node in tree.nodes():
            assert len(node.record_keys) <= len(node.blocks)
            before = end_key(node.parent, self.first_key) if node.parent else b""
            for ids, key in zip(node.keys, node.record_keys, strict=False):
                before = next_key(before, ids)
                assert key == before, f"node at {node.start}: a key is not that of its path"
