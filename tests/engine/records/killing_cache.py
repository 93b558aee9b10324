"""Kills a torch-free writer of a prefix cache: 20 times in a test, in a script at will."""

from __future__ import annotations

import random
import time
from pathlib import Path

import numpy as np
from endless_cache_writer import MAX_BYTES, RECORD_BYTES, key_of, record_of
from killing import kill, start_writer

from cotrt.engine.records import record_file
from cotrt.engine.records.disk_store import DiskStore

WRITER = Path(__file__).resolve().parent / "endless_cache_writer.py"


def kill_while_caching(folder: Path, times: int, seed: int) -> tuple[int, int]:
    """Kill a writer `times` times; after each all records are whole, and the next start is clean.

    Returns:
        How many whole records were looked at, and how many times a leftover, which the next
        start removed.
    """
    pick, whole, left = random.Random(seed), 0, 0
    for turn in range(times):
        writer, _ = start_writer(WRITER, folder, "keep", turn * 100_000)
        time.sleep(pick.random() * 0.05)
        kill(writer)
        found = {path.name for path in folder.iterdir()}
        keys = {name: record_file.key_of(name) for name in found}
        records = {name for name, key in keys.items() if key is not None}
        left += len(found) > len(records)
        store = DiskStore(folder, 2 * MAX_BYTES, record_bytes=RECORD_BYTES, keep=True)
        try:
            assert {path.name for path in folder.iterdir()} == records, "a leftover was not removed"
            assert len(store) == len(records) > 0
            for name in records:
                number = int.from_bytes(keys[name] or b"", "little")
                assert keys[name] == key_of(number)
                record = store.read(key_of(number))
                assert record is not None, f"{name} is not whole"
                assert np.array_equal(record, record_of(number)), f"{name} is another record"
            store.check_invariants()
        finally:
            store.close()
        whole += len(records)
    return whole, left
