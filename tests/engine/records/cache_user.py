"""Reads and writes random records of a prefix cache that others use too, without torch.

    python cache_user.py FOLDER SEED

It says "ready", waits for a line, and says in the end how many records it read that only others
wrote, and how many it wrote.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from endless_cache_writer import RECORD_BYTES, key_of, record_of

from cotrt.engine.records import disk_store, record_file
from cotrt.engine.records.disk_store import DiskStore

FILE_BYTES = record_file.HEADER_BYTES + RECORD_BYTES
# The folder has room for an eighth of the records.
NUM_RECORDS = 800
MAX_BYTES = NUM_RECORDS // 8 * FILE_BYTES
NUM_USES = 2000


def main() -> None:
    """Use records at random; an exit status other than 0 says that something was wrong."""
    assert "torch" not in sys.modules
    disk_store._RESCAN_SECONDS = 0.05
    store = DiskStore(sys.argv[1], MAX_BYTES, record_bytes=RECORD_BYTES, keep=True)
    pick = random.Random(int(sys.argv[2]))
    print("ready", flush=True)
    sys.stdin.readline()
    written: set[int] = set()
    num_of_others = 0
    for turn in range(NUM_USES):
        number = pick.randrange(NUM_RECORDS)
        key = key_of(number)
        record = store.read(key) if key in store else None
        if record is None:
            store.put(key, 16, record_of(number))
            written.add(number)
        else:
            assert np.array_equal(record, record_of(number)), f"{number} is another record"
            num_of_others += number not in written
        if turn % 16 == 0:
            assert store.flush(60)
    assert store.flush(60) and store.stopped is None
    store.check_invariants()
    store.close(60)
    print(num_of_others, len(written), flush=True)


if __name__ == "__main__":
    main()
