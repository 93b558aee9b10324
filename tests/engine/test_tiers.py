"""Memory tiers over an engine: nothing lost, nothing wrong, whatever the stores do."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_rig import Rig
from logged_model import probs
from path_kv import path_records

from cotrt.engine.records.record_stores import TierOptions
from cotrt.engine.state import GenerationState
from cotrt.errors import InvalidRequestError
from cotrt.program.branch import Branch
from cotrt.program.stats import branch_kv, memory_stats
from cotrt.saved.reader import SavedFile
from cotrt.tree.schedule.memory_pressure import give_up
from cotrt.tree.tiers import tiers
from cotrt.tree.tiers.tiers import Tiers

Made = Callable[..., Rig]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Made]:
    """Rigs by the name of their tier; "small" are those with a pool too small."""
    rigs: list[Rig] = []

    def made(tier: str | None, **options: Any) -> Rig:
        tiers = {
            None: None,
            "host": TierOptions(host_bytes=1 << 16, always="move"),
            "tiny host": TierOptions(host_bytes=8 * 64, always="move"),
            "disk": TierOptions(disk_bytes=64 << 20, disk_dir=tmp_path, always="move"),
            "both": TierOptions(
                host_bytes=8 * 64, disk_bytes=64 << 20, disk_dir=tmp_path, always="move"
            ),
            "kept": TierOptions(
                disk_bytes=64 << 20, disk_dir=tmp_path / "kept", keep=True, always="move"
            ),
            "small kept": TierOptions(
                disk_bytes=16 * 4096, disk_dir=tmp_path / "kept", keep=True, always="move"
            ),
            "costs": TierOptions(host_bytes=1 << 16),
        }[tier]
        rig = Rig(tiers=tiers, **options)
        rigs.append(rig)
        return rig

    yield made
    for rig in rigs:
        if rig.engine.records is not None:
            rig.engine.records.close()


def _chats(rig: Rig, count: int, turns: int = 3) -> list[GenerationState]:
    """Branches with a common beginning that are gone back to, turn after turn."""
    common = [1, 2, 3, 1, 2, 3, 4, 5, 6, 7]
    branches = [rig.root([*common, 1 + i % 5, 1 + i // 5, *common[: i % 7]]) for i in range(count)]
    states = []
    for turn in range(turns):
        batch = [
            rig.start(b, max_tokens=9 + (i + turn) % 5, ignore_eos=True, seed=i, logprobs=1)
            for i, b in enumerate(branches)
        ]
        rig.run()
        states += batch
        for branch in branches:
            branch.extend([turn + 1, 7, 7])
    return states


def _shown(states: list[GenerationState]) -> list[Any]:
    return [(s.tokens, s.logprobs, s.finish_reason, s.scores) for s in states]


@pytest.mark.parametrize("tier", [None, "host", "tiny host", "disk", "both", "kept", "costs"])
def test_24_branches_in_a_third_of_the_room_are_as_in_a_large_pool(
    make: Made, tier: str | None
) -> None:
    large = make(None, num_blocks=400)
    expected = _shown(_chats(large, 24))
    used = large.tree.pool.num_in_use
    small = make(tier, num_blocks=used // 3)
    assert _shown(_chats(small, 24)) == expected
    metrics = small.metrics
    for name in ("prompt_tokens_computed", "generated_tokens_computed", "generated_tokens"):
        assert metrics[name] == large.metrics[name]  # once each, loaded or computed again
    if tier in ("host", "disk", "both", "kept"):  # a disk brings what it can bring in time
        assert metrics["loaded_tokens"] > (1000 if tier == "host" else 0)
        assert metrics["failed_loads"] == 0


def test_with_room_below_the_pool_nothing_is_computed_again(make: Made) -> None:
    bare, tiered = make(None, num_blocks=40), make("host", num_blocks=40)
    assert _shown(_chats(bare, 12)) == _shown(_chats(tiered, 12))
    assert bare.metrics["recomputed_tokens"] > 20 * max(1, tiered.metrics["recomputed_tokens"])
    assert tiered.metrics["prompt_tokens_reused"] > bare.metrics["prompt_tokens_reused"]


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_an_idle_branch_comes_back_whole(make: Made, tier: str) -> None:
    """Its tail too: no row of it is computed a second time."""
    rig = make(tier, num_blocks=8)
    idle = rig.root([1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 5, 6])
    rig.start(idle, max_tokens=8, seed=1, ignore_eos=True)
    rig.run()
    held = idle._seq.num_computed
    assert held == 20 and branch_kv(rig.engine, idle._seq).location == "device"
    other = rig.root([7] * 60)
    rig.start(other, max_tokens=2, ignore_eos=True)
    rig.run()
    kv = branch_kv(rig.engine, idle._seq)
    assert (kv.location, kv.blocks, kv.computed_tokens) == (tier, 0, 0)
    memory = memory_stats(rig.engine)
    assert memory.host + memory.disk >= 3 and (memory.host > 0) == (tier == "host")
    other.prune()
    before = rig.metrics
    state = rig.start(idle, max_tokens=4, seed=2, ignore_eos=True)
    rig.run()
    after = rig.metrics
    assert after["loaded_tokens"] - before["loaded_tokens"] == held
    assert after["recomputed_tokens"] == before["recomputed_tokens"]
    assert after["prompt_tokens_reused"] - before["prompt_tokens_reused"] == held
    assert state.num_cached == held
    assert state.tokens == rig.solo(state).tokens


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_what_is_still_to_be_stored_is_saved_from_its_blocks(
    make: Made, tier: str, tmp_path: Path
) -> None:
    rig = make(tier)
    branch = rig.root([1 + i % 5 for i in range(21)])
    rig.start(branch, max_tokens=1, temperature=0.0)
    rig.run()
    ids = branch._seq.ids()
    give_up(rig.tree, branch._seq)
    while rig.tree.pool.num_cached:  # its whole blocks too are on their way
        rig.tree.allocate()
    steps = rig.num_steps
    branch.save(tmp_path / "saved")
    assert rig.num_steps == steps
    file = SavedFile(tmp_path / "saved")
    (chunk,) = file.chunks
    assert (chunk.start, chunk.num_tokens) == (0, 21)
    assert file.read_kv(0, 0, 21).view(np.int32)[:21].tolist() == ids[:21]
    file.close()


def test_what_was_pruned_is_not_kept(make: Made) -> None:
    rig = make("host", num_blocks=8)
    branch = rig.root([1] * 20)
    rig.start(branch, max_tokens=4, ignore_eos=True)
    rig.run()
    branch.prune()
    rig.start(rig.root([2] * 60), max_tokens=2, ignore_eos=True)
    rig.run()
    assert rig.metrics["stored_blocks"] == 0 and rig.metrics["evicted_blocks"] > 0


def test_what_a_sibling_reads_stays(make: Made) -> None:
    """A running fork keeps the shared part where it is while its idle sibling is taken down."""
    rig = make("host", num_blocks=8)
    root = rig.root([1, 2, 3, 4] * 6)
    rig.start(root, max_tokens=1, ignore_eos=True)
    rig.run()
    first, second = root.fork(2)
    rig.start(first, max_tokens=20, ignore_eos=True, seed=1)
    rig.run()
    shared = set(rig.tree.path(second._seq)[0].blocks)
    running = rig.start(second, max_tokens=30, ignore_eos=True, seed=2)
    while not running.promise.done:
        rig.step()
        assert shared <= rig.tree.blocks_of(second._seq)
    assert running.tokens == rig.solo(running).tokens
    assert branch_kv(rig.engine, first._seq).location == "host"
    assert rig.metrics["stored_blocks"] > 0 and rig.metrics["preemptions"] == 0


def _computed(rig: Rig, *prompts: list[int]) -> list[Branch]:
    """Idle branches of these prompts, each used after the one before."""
    branches = [rig.root(prompt) for prompt in prompts]
    for branch in branches:
        rig.start(branch, max_tokens=1, ignore_eos=True)
        rig.run()
    return branches


def _crowd(rig: Rig, num_tokens: int) -> None:
    """Another's prompt of so many tokens takes room in the pool."""
    rig.start(rig.root([3] * num_tokens), max_tokens=4, ignore_eos=True)
    rig.run()


def _location(rig: Rig, branch: Branch) -> str:
    return branch_kv(rig.engine, branch._seq).location


def test_a_lease_is_given_up_last(make: Made) -> None:
    rig = make("host", num_blocks=12)
    kept, other = _computed(rig, [1] * 20, [2] * 20)
    kept.keep(1000)
    _crowd(rig, 60)
    assert _location(rig, kept) == "device"
    assert _location(rig, other) == "host"


def test_a_lease_counts_for_more_than_blocks_held_alone(make: Made) -> None:
    rig = make("host", num_blocks=12)
    root, kept = _computed(rig, [1] * 20, [2] * 20)
    forks = root.fork(2)  # nobody holds a block of these alone
    kept.keep(1000)
    _crowd(rig, 60)
    assert _location(rig, kept) == "device"
    assert [_location(rig, b) for b in (root, *forks)] == ["host"] * 3


def test_leases_that_have_outgrown_their_share_count_oldest_first(make: Made) -> None:
    rig = make("host", num_blocks=12)
    first, second = rig.root([1] * 9), rig.root([2] * 9)
    for branch in (first, second):
        branch.keep(1000)
    for branch in (first, second):
        rig.start(branch, max_tokens=30, ignore_eos=True)
        rig.run()
    with pytest.raises(InvalidRequestError, match="10 blocks would be kept in all, the limit is 6"):
        second.keep(2000)
    _crowd(rig, 40)
    assert _location(rig, first) == "device"
    assert _location(rig, second) == "host"


def test_a_score_is_a_use(make: Made) -> None:
    rig = make("host", num_blocks=10)
    scored, other = _computed(rig, [1] * 20, [2] * 20)
    scored.score([1, 2])
    rig.run()
    _crowd(rig, 40)
    assert _location(rig, scored) == "device"
    assert _location(rig, other) == "host"


def test_a_step_may_consist_of_loads_alone_and_loads_have_a_budget(make: Made) -> None:
    rig = make("host", num_blocks=40)
    branch = rig.root([1, 2, 3, 4, 5] * 40)
    rig.start(branch, max_tokens=1, ignore_eos=True)
    rig.run()
    rig.start(rig.root([2] * 319), max_tokens=1, ignore_eos=True)
    rig.run()
    assert branch_kv(rig.engine, branch._seq).location == "host"
    rig.tree.tiers.costs.taking_in.value = 0.01 / (10 * 64)  # ten blocks a step
    rig.start(branch, max_tokens=1, ignore_eos=True)
    sizes = []
    rig.step()
    sizes.append((len(rig.last_step.plan.input_ids), len(rig.last_step.plan.loads)))
    assert sizes == [(0, 10)]
    assert branch._seq.num_computed == 80
    rig.run()
    assert rig.metrics["loaded_tokens"] == 200


def test_loads_get_on_however_slow_they_are(make: Made) -> None:
    rig = make("host", num_blocks=8)
    branch = rig.root([1, 2, 3, 4, 5] * 6)
    rig.start(branch, max_tokens=1, ignore_eos=True)
    rig.run()
    rig.start(rig.root([2] * 60), max_tokens=1, ignore_eos=True)
    rig.run()
    rig.tree.tiers.costs.taking_in.value = 10.0  # seconds a byte: a step takes one record
    rig.start(branch, max_tokens=1, ignore_eos=True)
    rig.step()
    assert len(rig.last_step.plan.loads) == 1
    rig.run(limit=50)
    assert rig.metrics["loaded_tokens"] >= 24


def test_two_that_need_the_same_records_load_them_once(make: Made) -> None:
    rig = make("host", num_blocks=30)
    ids = [1, 2, 3, 4, 5, 6] * 14
    rig.start(rig.root(ids), max_tokens=1, ignore_eos=True)
    rig.run()
    rig.start(rig.root([7] * 236), max_tokens=1, ignore_eos=True)
    rig.run()
    assert rig.metrics["stored_blocks"] >= 10
    rig.tree.tiers.costs.taking_in.value = 0.01 / (4 * 64)
    states = [rig.start(rig.root(ids), max_tokens=3, seed=i, ignore_eos=True) for i in range(3)]
    rig.run()
    assert rig.metrics["loaded_blocks"] <= 11
    assert min(s.num_cached for s in states) >= 80  # whole blocks; the tail went with its handle
    for state in states:
        assert state.tokens == rig.solo(state).tokens


def test_one_that_waited_for_records_may_get_all_from_anothers_rows(
    make: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make("host", num_blocks=30)
    ids = [1, 2, 3, 4, 5, 6] * 14
    rig.start(rig.root(ids), max_tokens=1, ignore_eos=True)
    rig.run()
    rig.start(rig.root([7] * 236), max_tokens=1, ignore_eos=True)
    rig.run()
    asked, true = [], Tiers.num_ready

    def num_ready(tiers: Tiers, load: Any, budget: int) -> int:
        asked.append(load)
        return 0 if len(asked) <= 2 else true(tiers, load, budget)

    # Both wait for their records, then the first has them and the second follows it.
    monkeypatch.setattr(Tiers, "num_ready", num_ready)
    states = [rig.start(rig.root(ids), max_tokens=5, seed=i, ignore_eos=True) for i in range(2)]
    rig.run()
    assert asked[0] is not asked[1] and len(asked) > 2
    for state in states:
        assert state.tokens == rig.solo(state).tokens


def test_a_large_host_tier_spills_to_disk(make: Made) -> None:
    rig = make("both", num_blocks=40)
    _chats(rig, 16)
    memory = memory_stats(rig.engine)
    assert memory.host == 8 and memory.disk > 8


def _flip(record: Path) -> None:
    data = bytearray(record.read_bytes())
    data[-1] ^= 1
    record.write_bytes(data)


def _cut(record: Path) -> None:
    record.write_bytes(record.read_bytes()[:-3])


def _garbage(record: Path) -> None:
    record.write_bytes(b"something else")


@pytest.mark.parametrize("damage", [_flip, _cut, _garbage, Path.unlink])
def test_a_damaged_record_is_computed_instead(
    make: Made, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    rig = make("disk", num_blocks=8)
    branch = rig.root([1, 2, 3, 4, 5, 6] * 5)
    rig.start(branch, max_tokens=4, ignore_eos=True, seed=3)
    rig.run()
    rig.start(rig.root([7] * 60), max_tokens=2, ignore_eos=True)
    rig.run()
    disk = rig.engine.records.disk
    assert disk.flush(30)
    records = sorted(disk.folder.glob("*.kv"))
    assert len(records) >= 4
    for record in records:
        damage(record)
    with caplog.at_level(logging.WARNING, "cotrt"):
        state = rig.start(branch, max_tokens=4, ignore_eos=True, seed=4)
        rig.run()
    assert state.tokens == rig.solo(state).tokens
    assert rig.metrics["failed_loads"] >= 1 and rig.metrics["loaded_blocks"] == 0
    assert rig.metrics["recomputed_tokens"] >= 33
    wrong = [r.getMessage() for r in caplog.records if "is dropped" in r.getMessage()]
    assert len(wrong) == len(set(wrong)) and bool(wrong) == (damage is not Path.unlink)


def test_a_full_disk_is_said_once_and_work_goes_on(
    make: Made, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*args: Any) -> int:
        raise OSError(28, "No space left on device")

    rig = make("disk", num_blocks=20)
    monkeypatch.setattr("cotrt.engine.records.record_file.write", full)
    with caplog.at_level(logging.WARNING, "cotrt"):
        states = _chats(rig, 8)
        deadline = time.monotonic() + 30
        while rig.engine.records.disk.stopped is None and time.monotonic() < deadline:
            time.sleep(0.01)
    expected = _shown(_chats(make(None, num_blocks=200), 8))
    assert _shown(states) == expected
    lines = [r.getMessage() for r in caplog.records if "No space left" in r.getMessage()]
    assert len(lines) == 1
    assert rig.engine.records.tier_for(1) is None


def test_a_slow_disk_is_not_waited_for(make: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing comes back from it; its tokens are computed, and other work does not stop."""
    rig = make("disk", num_blocks=8)
    branch = rig.root([1, 2, 3, 4, 5, 6] * 5)
    rig.start(branch, max_tokens=4, ignore_eos=True, seed=3)
    rig.run()
    filler = rig.root([7] * 60)
    rig.start(filler, max_tokens=2, ignore_eos=True)
    rig.run()
    assert rig.engine.records.disk.flush(30)
    filler.prune()
    monkeypatch.setattr(rig.engine.records, "is_ready", lambda key: False)
    slow = rig.start(branch, max_tokens=4, ignore_eos=True, seed=4)
    quick = rig.start(rig.root([3, 3]), max_tokens=3, ignore_eos=True)
    steps = 0
    while not quick.promise.done:
        rig.step()
        steps += 1
    assert steps <= 5 and not slow.promise.done
    rig.run(limit=100_000)
    assert slow.tokens == rig.solo(slow).tokens
    assert rig.metrics["loaded_blocks"] == 0


def test_a_prefix_cache_serves_the_next_engine(make: Made) -> None:
    first = make("kept", num_blocks=64)
    ids = [1, 2, 3, 4, 5, 6, 7] * 8
    state = first.start(first.root(ids), max_tokens=20, ignore_eos=True, seed=5)
    first.run()
    first.engine.records.close()
    second = make("kept", num_blocks=64)
    second.model.known = first.model.computed
    again = second.start(second.root(ids), max_tokens=20, ignore_eos=True, seed=5)
    second.run()
    assert again.tokens == state.tokens and again.logprobs == state.logprobs
    assert second.metrics["loaded_tokens"] == 56
    assert second.metrics["prompt_tokens_computed"] == 0
    assert again.num_cached == 55 or again.num_cached == 56


@pytest.mark.parametrize("found", [range(10), [9]], ids=["ever", "late"])
def test_a_prefix_that_the_pool_has_stays_on_disk_for_the_next_engine(
    make: Made, found: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is found in the pool and never loaded, while others fill the disk several times over."""
    monkeypatch.setattr(tiers, "_NOTE_SECONDS", 0.0)
    first = make("small kept", num_blocks=128)
    prefix = [1, 2, 3, 4, 5, 6, 7, 7] * 3
    for turn in range(10):
        if turn == 0 or turn in found:
            first.start(first.root([*prefix, 1 + turn % 7]), max_tokens=2, ignore_eos=True)
            first.run()
        other = [random.Random(100 * turn + i).randrange(1, 8) for i in range(33)]
        first.start(first.root(other), max_tokens=2, ignore_eos=True)
        first.run()
        assert first.engine.records.disk.flush(30)
    assert first.metrics["loaded_tokens"] == 0 and first.metrics["stored_blocks"] > 40
    first.engine.records.close()
    second = make("small kept", num_blocks=128)
    second.start(second.root([*prefix, 3]), max_tokens=2, ignore_eos=True)
    second.run()
    assert second.metrics["loaded_tokens"] == 24


def test_records_of_what_the_pool_has_are_touched_now_and_then(
    make: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make("kept", num_blocks=128)
    now = 1000.0
    rig.tree.tiers.clock = lambda: now
    touched: list[bytes] = []
    monkeypatch.setattr(rig.engine.records, "touch", touched.append)
    for wait, expected in ((0, 0), (0, 3), (29, 0), (2, 3), (0, 0)):
        now += wait
        touched.clear()
        rig.start(rig.root([1, 2, 3, 4, 5, 6, 7, 7] * 3 + [5]), max_tokens=2, ignore_eos=True)
        rig.run()
        assert len(touched) == expected


def test_another_models_prefix_cache_is_not_used(make: Made) -> None:
    first = make("kept", num_blocks=64)
    ids = [1, 2, 3, 4, 5, 6, 7] * 8
    first.start(first.root(ids), max_tokens=2, ignore_eos=True)
    first.run()
    first.engine.records.close()
    second = make("kept", num_blocks=64, fingerprint="another")
    second.start(second.root(ids), max_tokens=2, ignore_eos=True)
    second.run()
    assert second.metrics["loaded_tokens"] == 0


def test_without_prompt_matching_only_ones_own_kv_comes_back(make: Made) -> None:
    rig = make("host", num_blocks=8, match_prompts=False)
    ids = [1, 2, 3, 4, 5, 6] * 5
    mine = rig.root(ids)
    rig.start(mine, max_tokens=1, ignore_eos=True)
    rig.run()
    filler = rig.root([7] * 60)
    rig.start(filler, max_tokens=2, ignore_eos=True)
    rig.run()
    filler.prune()
    rig.start(rig.root(ids), max_tokens=1, ignore_eos=True)
    rig.run()
    assert rig.metrics["loaded_tokens"] == 0
    mine.extend([2, 2])
    rig.start(mine, max_tokens=1, ignore_eos=True)
    rig.run()
    assert rig.metrics["loaded_tokens"] > 0


class Source:
    """Records of one path, as a saved branch's file gives them."""

    def __init__(self, records: dict[bytes, bytes]) -> None:
        self.records = records
        self.num_read = 0

    def keys(self) -> dict[bytes, bytes]:
        return {key: key for key in self.records}

    def read(self, handle: bytes) -> bytes:
        self.num_read += 1
        if not self.records[handle]:
            raise ValueError("its checksum differs")
        return self.records[handle]

    def close(self) -> None:
        pass


@pytest.mark.parametrize("bad", [False, True])
def test_a_source_is_paged_in_where_it_is_needed(make: Made, bad: bool) -> None:
    from tree_rig import path_keys

    from cotrt.tree.tiers.record_keys import root_key, tail_keys

    rig = make(None, num_blocks=16)
    ids = [1, 2, 3, 4, 5, 6] * 5  # three blocks of 8 and a tail of 6
    keys = list(path_keys(root_key(rig.model.fingerprint, 8), ids, 8))
    keys.append(tail_keys(keys[-1], ids[24:])[-1])
    parts = path_records(ids, 8)
    if bad:
        parts[1] = b""
    source = Source(dict(zip(keys, parts, strict=True)))
    rig.engine.add_source(source)
    state = rig.start(rig.root([*ids, 3, 3]), max_tokens=4, ignore_eos=True)
    rig.run()
    assert state.tokens == rig.solo(state).tokens
    assert rig.metrics["loaded_tokens"] == (8 if bad else 30)
    assert rig.metrics["failed_loads"] == bad
    assert rig.metrics["prompt_tokens_computed"] == (24 if bad else 2)
    assert source.num_read == 4


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("count", [2, 6])
@pytest.mark.parametrize("match", [True, False])
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 0.8, "seed": 7}])
def test_b12_preempted_requests_end_as_alone(
    make: Made, tier: str, count: int, match: bool, params: dict[str, Any]
) -> None:
    """Case B12 with a tier: 40 tokens in, 60 out, in a pool of 8 blocks of 16."""
    rig = make(tier, num_blocks=8, block_size=16, match_prompts=match)
    states = [
        rig.start(
            rig.root([1 + (i + j) % 9 for j in range(40)]),
            max_tokens=60,
            presence_penalty=0.6,
            logprobs=1,
            ignore_eos=True,
            **params,
        )
        for i in range(count)
    ]
    rig.run()
    for state in states:
        twin = rig.solo(state)
        assert (state.tokens, state.logprobs) == (twin.tokens, twin.logprobs)
        assert len(state.tokens) == len(state.scores) == 60
    metrics = rig.metrics
    assert metrics["preemptions"] > 0 and metrics["generated_tokens"] == 60 * count
    assert metrics["loaded_tokens"] > 0
    assert probs([1])  # the model's draws depend on the whole path
