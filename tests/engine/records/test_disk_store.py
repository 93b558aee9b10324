"""The disk tier: bounded files, whole or not at all, whoever else is in the folder."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cache_user
import numpy as np
import pytest
from killing import kill, start_writer
from killing_cache import WRITER, kill_while_caching

from cotrt.engine.records import disk_store, record_file, record_folder
from cotrt.engine.records.disk_store import DiskStore
from cotrt.engine.records.private_folder import PrivateFolder, remove_abandoned
from cotrt.plan import UInt8

RECORD = 5000
MIB = 1 << 20


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def record(number: int, size: int = RECORD) -> UInt8:
    return np.random.default_rng(number).integers(0, 256, size, dtype=np.uint8)


Made = Callable[..., DiskStore]


@pytest.fixture
def made() -> Iterator[Callable[..., DiskStore]]:
    stores: list[DiskStore] = []

    def make(folder: Path, max_bytes: int = 4 * MIB, *, keep: bool = True) -> DiskStore:
        stores.append(DiskStore(folder, max_bytes, record_bytes=RECORD, keep=keep))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


def test_a_record_is_read_as_it_was_put(made: Made, tmp_path: Path) -> None:
    store = made(tmp_path)
    mine = record(1)
    store.put(key(1), 16, mine)
    mine[:] = 0  # it was copied
    assert key(1) in store and np.array_equal(store.read(key(1)), record(1))
    assert store.flush(30) and not store.is_staged(key(1))
    assert np.array_equal(store.read(key(1)), record(1))
    store.put(key(2), 3, record(2, 900))
    assert store.has_tails and np.array_equal(store.read(key(2)), record(2, 900))
    assert key(3) not in store and store.read(key(3)) is None
    store.check_invariants()


def test_a_kept_folder_serves_the_next_store(made: Made, tmp_path: Path) -> None:
    first = made(tmp_path / "deep" / "cache")
    for number in range(20):
        first.put(key(number), 16, record(number))
    first.close()
    second = made(tmp_path / "deep" / "cache")
    assert len(second) == 20
    assert all(np.array_equal(second.read(key(n)), record(n)) for n in range(20))
    assert (tmp_path / "deep" / "cache").stat().st_mode & 0o077 == 0


def test_the_least_recently_used_go_first(made: Made, tmp_path: Path) -> None:
    size = RECORD + record_file.HEADER_BYTES
    store = made(tmp_path, 10 * size)
    for number in range(10):
        store.put(key(number), 16, record(number))
        assert store.flush(30)
    assert store.read(key(0)) is not None
    store.touch(key(1))
    for number in range(10, 15):
        store.put(key(number), 16, record(number))
        assert store.flush(30)
    deadline = time.monotonic() + 30
    while len(list(tmp_path.glob("*.kv"))) > 10 and time.monotonic() < deadline:
        time.sleep(0.01)
    there = {n for n in range(15) if store.read(key(n)) is not None}
    assert there == {0, 1, 7, 8, 9, 10, 11, 12, 13, 14}
    assert sum(p.stat().st_size for p in tmp_path.glob("*.kv")) <= 10 * size
    store.check_invariants()


def _numbers(folder: Path) -> set[int]:
    keys = [record_file.key_of(path.name) for path in folder.glob("*.kv")]
    return {int.from_bytes(k, "little") for k in keys if k is not None}


def _wait_for(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not done() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert done()


def _fill(made: Made, folder: Path, numbers: range) -> None:
    """Records that were used long ago, the first first."""
    store = made(folder)
    for number in numbers:
        store.put(key(number), 16, record(number))
    store.close(30)
    for number in numbers:
        os.utime(folder / record_file.name_of(key(number)), (number + 1.0, number + 1.0))


def _touch(store: DiskStore, number: int) -> None:
    store.touch(key(number))


def _put(store: DiskStore, number: int) -> None:
    store.put(key(number), 16, record(number))


def _read(store: DiskStore, number: int) -> None:
    assert store.read(key(number)) is not None


USES = pytest.mark.parametrize("use", [_touch, _put, _read])


@USES
def test_a_record_in_use_stays_however_often_the_folder_is_looked_at(
    made: Made,
    tmp_path: Path,
    use: Callable[[DiskStore, int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(disk_store, "_RESCAN_SECONDS", 0.0)
    monkeypatch.setattr(disk_store, "_USE_SECONDS", 1e12)  # files' times say nothing of uses
    _fill(made, tmp_path, range(10))
    store = made(tmp_path, 10 * (RECORD + record_file.HEADER_BYTES))
    for number in range(10, 40):
        use(store, 3)
        store.put(key(number), 16, record(number))
        assert store.flush(30)
    _wait_for(lambda: _numbers(tmp_path) == {3, *range(31, 40)})
    store.check_invariants()


def test_what_is_used_while_the_folder_is_looked_at_counts(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fill(made, tmp_path, range(10))
    store = made(tmp_path)
    real = record_folder.look

    def look(folder: Path) -> Iterator[tuple[bytes, int, float]]:
        for found in sorted(real(folder), reverse=True):
            yield found
            if found[0] in (key(6), key(1)):
                store.touch(found[0])

    monkeypatch.setattr(record_folder, "look", look)
    store._scan()
    assert list(store._files) == [key(n) for n in (0, 2, 3, 4, 5, 7, 8, 9, 6, 1)]


@USES
def test_uses_count_over_a_restart(
    made: Made, tmp_path: Path, use: Callable[[DiskStore, int], None]
) -> None:
    size = RECORD + record_file.HEADER_BYTES
    _fill(made, tmp_path, range(10))
    second = made(tmp_path, 10 * size)
    use(second, 2)
    second.close(30)
    third = made(tmp_path, 10 * size)
    use(third, 5)
    use(third, 2)  # once more, a moment later: the end says it
    third.close(30)
    fourth = made(tmp_path, 10 * size)
    for number in range(10, 18):
        fourth.put(key(number), 16, record(number))
        assert fourth.flush(30)
    _wait_for(lambda: _numbers(tmp_path) == {2, 5, *range(10, 18)})
    fourth.put(key(18), 16, record(18))
    assert fourth.flush(30)
    _wait_for(lambda: _numbers(tmp_path) == {2, *range(10, 19)})


def test_other_processes_learn_of_uses_and_seldom(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file's time follows its record's use; again only when a while has passed."""
    _fill(made, tmp_path, range(10))
    path = tmp_path / record_file.name_of(key(4))
    told: list[str] = []
    real = os.utime

    def utime(path: Any, *args: Any) -> None:
        told.append(threading.current_thread().name)
        real(path, *args)

    monkeypatch.setattr(os, "utime", utime)
    store = made(tmp_path)
    store.touch(key(4))
    _wait_for(lambda: path.stat().st_mtime > 1e9)
    other = made(tmp_path)
    assert list(other._files)[-1] == key(4)
    for _ in range(100):
        store.touch(key(4))
        assert store.read(key(4)) is not None
    store.put(key(20), 16, record(20))
    assert store.flush(30)
    store.put(key(21), 16, record(21))  # the writer has been round once more
    assert store.flush(30)
    assert told == ["cotrt-disk"], "it is not told in the thread that uses it, nor each time"


def test_a_folder_above_its_bound_is_made_to_fit_at_the_start(made: Made, tmp_path: Path) -> None:
    _fill(made, tmp_path, range(60))
    store = made(tmp_path, 20 * (RECORD + record_file.HEADER_BYTES))
    _wait_for(lambda: _numbers(tmp_path) == set(range(40, 60)))
    assert len(store) == 20
    store.check_invariants()


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: random.Random(0).randrange(RECORD)])


def _longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[random.Random(1).randrange(len(data))] ^= 4
    path.write_bytes(data)


def _foreign(path: Path) -> None:
    path.write_bytes(os.urandom(RECORD))


def _anothers(path: Path) -> None:
    record_file.write(path, path.with_suffix(".tmp"), key(99), 16, record(99))


def _huge(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(1 << 40)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    "damage", [_cut, _longer, _flip, _foreign, _anothers, _huge, _folder, _fifo]
)
def test_a_file_that_is_not_the_record_is_dropped_with_a_line(
    made: Made, tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    store = made(tmp_path)
    store.put(key(1), 16, record(1))
    assert store.flush(30)
    path = tmp_path / record_file.name_of(key(1))
    damage(path)
    found: list[UInt8 | None] = []
    with caplog.at_level(logging.WARNING, "cotrt"):
        reader = threading.Thread(target=lambda: found.append(store.read(key(1))), daemon=True)
        reader.start()
        reader.join(30)
    assert found == [None], "it is not waited for"
    assert len(caplog.records) == 1 and path.name in caplog.text
    assert ("no regular file" in caplog.text) == (damage is _fifo)
    assert key(1) not in store and (path.is_dir() or not path.exists())
    store.put(key(1), 16, record(1))
    store.check_invariants()


def test_a_file_that_another_process_removed_is_no_fault(
    made: Made, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = made(tmp_path)
    store.put(key(1), 16, record(1))
    assert store.flush(30)
    (tmp_path / record_file.name_of(key(1))).unlink()
    assert store.read(key(1)) is None and key(1) not in store
    assert not caplog.records


def test_a_full_disk_turns_writing_off(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = made(tmp_path)
    store.put(key(1), 16, record(1))
    assert store.flush(30)
    real, count = os.replace, 0

    def full(*args: Any) -> None:
        nonlocal count
        count += 1
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    for number in range(2, 30):
        store.put(key(number), 16, record(number))
    deadline = time.monotonic() + 30
    while store.stopped is None and time.monotonic() < deadline:
        time.sleep(0.01)
    monkeypatch.setattr(os, "replace", real)
    store.put(key(50), 16, record(50))
    assert store.flush(5) and count == 1
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert not store.can_take(1) and key(50) not in store
    assert np.array_equal(store.read(key(1)), record(1))
    assert [p.name for p in tmp_path.iterdir()] == [record_file.name_of(key(1))]


def test_a_slow_disk_drops_and_never_waits(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = made(tmp_path, 64 * RECORD)
    gate, real = threading.Event(), record_file.write

    def slow(*args: Any) -> int:
        gate.wait(60)
        return real(*args)

    monkeypatch.setattr(record_file, "write", slow)
    for number in range(100):
        store.put(key(number), 16, record(number))
    assert store.num_dropped > 50 and not store.can_take(16 * RECORD)
    store.check_invariants()
    gate.set()
    assert store.flush(30)
    assert len(list(tmp_path.glob("*.kv"))) == 100 - store.num_dropped


def test_two_stores_in_one_folder(made: Made, tmp_path: Path) -> None:
    """Both write the same and different records, and evict each other's."""
    stores = [made(tmp_path, 40 * RECORD) for _ in range(2)]
    wrong: list[int] = []

    def use(store: DiskStore, seed: int) -> None:
        pick = random.Random(seed)
        for _ in range(300):
            number = pick.randrange(60)
            found = store.read(key(number)) if key(number) in store else None
            if found is None:
                store.put(key(number), 16, record(number))
            elif not np.array_equal(found, record(number)):
                wrong.append(number)

    threads = [threading.Thread(target=use, args=(s, i)) for i, s in enumerate(stores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not wrong
    for store in stores:
        assert store.flush(30) and store.stopped is None
        store.check_invariants()
    third = made(tmp_path, 40 * RECORD)
    third.put(key(1000), 16, record(1000))
    assert third.flush(30)
    third._make_room()
    assert third._used <= 40 * RECORD


def test_two_processes_in_one_folder(made: Made, tmp_path: Path) -> None:
    """They read each other's records; what they write between two looks may exceed the bound."""
    folder = tmp_path / "cache"
    script = Path(cache_user.__file__)
    users = [
        subprocess.Popen(
            [sys.executable, str(script), str(folder), str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for seed in range(2)
    ]
    try:
        for user in users:
            assert user.stdout is not None and user.stdout.readline() == b"ready\n"
        for user in users:
            assert user.stdin is not None
            user.stdin.write(b"go\n")
            user.stdin.flush()
        most = 0
        deadline = time.monotonic() + 300
        while any(user.poll() is None for user in users) and time.monotonic() < deadline:
            most = max(most, _bytes_in(folder))
            time.sleep(0.005)
        said = [user.communicate(timeout=60) for user in users]
    finally:
        for user in users:
            user.kill()
            user.wait()
    for user, (out, error) in zip(users, said):
        assert user.returncode == 0, error.decode()
        assert all(int(number) > 0 for number in out.split()), out
    # Each keeps what it knows of within the bound. A look of ours takes time, hence a few more.
    assert most <= 2 * cache_user.MAX_BYTES + 16 * cache_user.FILE_BYTES
    assert 0 < _bytes_in(folder) <= cache_user.MAX_BYTES, "the last look makes room"
    assert all(record_file.key_of(path.name) for path in folder.iterdir())
    store = made(folder)
    for number in _numbers(folder):
        assert np.array_equal(store.read(key(number)), record(number))


def _bytes_in(folder: Path) -> int:
    total = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                total += entry.stat().st_size
    return total


def test_a_private_folder_goes_at_the_end(made: Made, tmp_path: Path) -> None:
    store = made(tmp_path, keep=False)
    store.put(key(1), 16, record(1))
    assert store.flush(30)
    assert store.folder.parent == tmp_path and len(list(store.folder.glob("*.kv"))) == 1
    other = made(tmp_path, keep=False)
    assert store.folder.is_dir(), "the folder of a process that lives is left alone"
    other.close()
    store.close()
    assert not list(tmp_path.iterdir())


def test_a_killed_writer_leaves_whole_records_only(tmp_path: Path) -> None:
    """Kill -9 at moments of chance; what is there is whole, and the next start is clean."""
    whole, _ = kill_while_caching(tmp_path, 20, seed=0)
    assert whole >= 20


def test_the_folder_of_a_killed_process_is_removed_by_the_next(made: Made, tmp_path: Path) -> None:
    process, _ = start_writer(WRITER, tmp_path, "private", 0)
    (theirs,) = tmp_path.iterdir()
    remove_abandoned(tmp_path)
    assert theirs.is_dir(), "its process lives"
    kill(process)
    store = made(tmp_path, keep=False)
    assert list(tmp_path.iterdir()) == [store.folder]


def test_a_folder_that_is_being_made_is_left_alone(tmp_path: Path) -> None:
    new = tmp_path / "cotrt-kv-new"
    new.mkdir()
    remove_abandoned(tmp_path)
    assert new.is_dir()
    os.utime(new, (0, 0))
    remove_abandoned(tmp_path)
    assert not new.exists()


def test_a_forked_child_does_not_remove_its_parents_folder(tmp_path: Path) -> None:
    folder = PrivateFolder(tmp_path)
    folder._pid += 1
    folder.remove()
    assert folder.path.is_dir()
    folder._pid -= 1
    folder.remove()
    assert not folder.path.exists()


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for keep in (True, False):
        with pytest.raises(OSError):
            DiskStore(tmp_path / "file" / "x", MIB, record_bytes=RECORD, keep=keep)
