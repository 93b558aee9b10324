"""Keys of records, the choice between moving and computing, and what it is worth."""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Sequence

import pytest
from tree_rig import Desk, Grove, path_keys

from cotrt.tree.schedule.memory_pressure import give_up
from cotrt.tree.tiers.record_keys import end_key, next_key, node_keys, root_key, tail_keys
from cotrt.tree.tiers.tier_costs import TierCosts
from cotrt.tree.tiers.tiers import Tiers

FIRST = root_key("model", 4)


def _key(key: bytes, ids: Sequence[int]) -> bytes:
    return hashlib.blake2b(key + struct.pack(f"<{len(ids)}I", *ids), digest_size=32).digest()


def test_a_key_is_a_hash_of_the_key_before_and_of_the_blocks_tokens() -> None:
    start = hashlib.blake2b(b"model" + struct.pack("<I", 4), digest_size=32).digest()
    assert start == FIRST and root_key("model", 8) != FIRST and root_key("other", 4) != FIRST
    ids = [5, 6, 7, 1 << 31, 1, 2, 3, 4, 9, 9]
    keys = list(path_keys(FIRST, ids, 4))
    assert keys == [_key(FIRST, ids[:4]), _key(_key(FIRST, ids[:4]), ids[4:8])]
    assert tail_keys(keys[-1], ids[8:]) == [_key(keys[-1], [9]), _key(keys[-1], [9, 9])]
    assert tail_keys(FIRST, ids[:4])[-1] == keys[0] == next_key(FIRST, ids[:4])


def test_keys_of_nodes_follow_splits_and_evictions() -> None:
    grove = Grove(num_blocks=12)
    long = grove.root()
    grove.compute(long, range(20))
    expected = list(path_keys(FIRST, range(20), 4))
    assert node_keys(long.node, FIRST) == expected
    other = grove.root()
    grove.compute(other, [*range(8), 50, 51, 52, 53])  # splits the first node after two blocks
    upper = long.node.parent
    assert upper is not None and upper is other.node.parent
    assert [k for node in grove.tree.path(long) for k in node.record_keys] == expected
    assert upper.end == 8 and long.node.record_keys == expected[2:]
    assert end_key(other.node, FIRST) == _key(expected[1], [50, 51, 52, 53])
    grove.drop(long)
    for _ in range(grove.tree.pool.num_free + 1):
        grove.tree.allocate()
    cut = upper.children[(8, 9, 10, 11)]
    assert cut.record_keys == expected[2:4] and len(cut.blocks) == 2


def test_a_deep_chain_of_nodes_is_hashed_without_recursion() -> None:
    grove = Grove(num_blocks=4000)
    tip = grove.root()
    for i in range(1500):  # a branch at each block makes a node of each
        tip.span.extend([i, 1, 2, 3])
        grove.tree.reserve(tip, 4)
        grove.tree.commit(tip, 4)
        grove.fork(tip)
    path = [token for i in range(1500) for token in (i, 1, 2, 3)]
    assert end_key(tip.node, FIRST) == list(path_keys(FIRST, path, 4))[-1]


@pytest.mark.parametrize(
    ("seconds_a_byte", "seconds_a_token", "stores"),
    [(1e-6, 1e-3, True), (1e-4, 1e-3, False), (None, 1e-3, True), (1.0, None, True)],
)
def test_moving_is_chosen_where_bytes_cost_less_than_tokens(
    seconds_a_byte: float | None, seconds_a_token: float | None, stores: bool
) -> None:
    costs = TierCosts()
    if seconds_a_byte is not None:
        costs.speed("disk").write.note(1, seconds_a_byte)
        costs.speed("disk").read.note(1, seconds_a_byte)
    if seconds_a_token is not None:
        costs.note_step(64, 64 * seconds_a_token)
    assert costs.should_store("disk", 4, 64) == stores  # 128 bytes of moving, 4 tokens
    if seconds_a_byte is not None and seconds_a_token is not None:
        assert costs.should_load("disk", 4, 64) == (64 * seconds_a_byte <= 4 * seconds_a_token)


def test_short_steps_say_nothing_of_a_prefills_speed() -> None:
    costs = TierCosts()
    costs.note_step(1, 10.0)
    assert costs.compute_seconds(4) is None
    costs.note_step(100, 1.0)
    costs.note_step(1, 10.0)
    assert costs.compute_seconds(4) == pytest.approx(0.04)


def test_a_tier_that_was_slow_is_tried_again() -> None:
    costs = TierCosts()
    costs.note_step(64, 1e-3)
    costs.speed("disk").write.note(1, 1.0)
    answers = [costs.should_store("disk", 4, 64) for _ in range(200)]
    assert 1 <= sum(answers) <= 4
    assert not TierCosts(always="compute").should_store("host", 1, 1)


def test_a_tail_that_is_still_to_be_copied_is_stored_from_its_source() -> None:
    """A step's stores come before its copies."""
    grove = Grove(num_blocks=8)
    tree = grove.tree
    tree.tiers = Tiers(SimulatedDisk(1e9, 1), TierCosts(always="move"), FIRST, 4, 1)
    first = grove.root()
    grove.compute(first, [7, 8, 9])
    second, third = grove.fork(first), grove.fork(first)
    for writer in (second, third):
        assert tree.reserve(writer, 1) is not None
    (source,) = first.private
    reader = grove.fork(third)  # as one that waits for room, and shares what `third` holds
    assert reader.private == third.private[:1] != [source]
    give_up(tree, reader)
    assert tree.tiers.take_stores() == ((source, _key(FIRST, [7, 8, 9]), 3),)
    again = grove.fork(third)
    assert tree.reserve(again, 1) is not None
    assert list(tree.uncopied.values()) == [source] * 3


class SimulatedDisk:
    """Records on a disk of some speed; time is simulated."""

    has_tails = True

    def __init__(self, bytes_a_second: float, token_bytes: int) -> None:
        self.rate = bytes_a_second
        self.token_bytes = token_bytes
        self.now = 0.0
        self.records: dict[bytes, int] = {}
        self.ready: dict[bytes, float] = {}
        self.busy_until = 0.0
        self.costs = TierCosts()

    def clock(self) -> float:
        return self.now

    def where(self, key: bytes) -> str | None:
        return "disk" if key in self.records else None

    def tier_for(self, num_bytes: int) -> str | None:
        return "disk" if self.busy_until - self.now < 1.0 else None

    def touch(self, key: bytes) -> None:
        pass

    def _move(self, size: int) -> float:
        self.busy_until = max(self.busy_until, self.now) + size / self.rate
        return self.busy_until

    def request(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            if key not in self.ready and key in self.records:
                self.ready[key] = self._move(self.records[key])
                self.costs.speed("disk").read.note(self.records[key], self.records[key] / self.rate)

    def is_ready(self, key: bytes) -> bool:
        return key not in self.records or self.ready.get(key, 1e9) <= self.now

    def store(self, stores: Sequence[tuple[int, bytes, int]]) -> None:
        for _, key, count in stores:
            self.records[key] = count * self.token_bytes
            self._move(self.records[key])
            seconds = self.records[key] / self.rate
            self.costs.speed("disk").write.note(self.records[key], seconds)


def simulate(disk_rate: float | None, *, turns: int = 6, chats: int = 16) -> float:
    """Tokens a second of chats that are gone back to by turns, in a pool of half their KV.

    A row of a prompt costs 1 ms and a decode step 15 ms, as of a small model on a CPU; a token's
    KV has 20 KB. Without a disk KV that does not fit is computed again.
    """
    block, token_bytes, context, reply = 16, 20_000, 320, 24
    final = context + turns * (reply + 8)
    desk = Desk(num_blocks=chats * (final // block + 1) // 2, block_size=block)
    disk = SimulatedDisk(disk_rate or 1.0, token_bytes)
    if disk_rate is not None:
        desk.tree.tiers = Tiers(
            disk, disk.costs, root_key("m", block), block, token_bytes, clock=disk.clock
        )
    pick = random.Random(0)
    seqs = [desk.root([pick.randrange(1000) for _ in range(context)]) for _ in range(chats)]
    generated = 0
    for _ in range(turns):
        for start in range(0, chats, 4):  # four speak at a time
            ends = {}
            for seq in seqs[start : start + 4]:
                ends[desk.generate(seq)] = seq.length + reply
            while desk.scheduler.has_work:
                step = desk.run(
                    lambda work, ends=ends: (
                        pick.randrange(1000) if work.seq.length < ends[work] else None
                    )
                )
                if step is None:
                    assert desk.scheduler.waits_for_records
                    disk.now += 1e-3
                    continue
                disk.store(step.plan.stores)
                rows = len(step.plan.input_ids)
                seconds = max(0.015 if rows else 0.0, rows * 1e-3)
                disk.costs.note_step(rows, seconds)
                seconds += len(step.plan.loads) * block * token_bytes / 5e9
                for key, _, _ in step.plan.loads:
                    disk.ready.pop(key, None)
                disk.now += seconds
                generated += len(step.draws)
            for seq in seqs[start : start + 4]:
                seq.span.extend([pick.randrange(1000) for _ in range(7)])
                seq.last_used = desk.tree.clock = desk.tree.clock + 1
    return generated / disk.now


def test_under_twofold_pressure_a_disk_beats_computing_again() -> None:
    bare, fast = simulate(None), simulate(1e9)
    assert fast > 1.3 * bare
    assert simulate(200e6) > 1.3 * bare


def test_a_disk_that_is_slower_than_computing_costs_little() -> None:
    """At 5 MB/s a token's KV takes 4 ms each way, and computing it 1 ms."""
    assert simulate(5e6) > 0.85 * simulate(None)
