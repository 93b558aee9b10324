"""Writes random records to a prefix cache for ever, without torch; made to be killed.

python endless_cache_writer.py FOLDER keep|private FIRST_NUMBER
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from cotrt.engine.records.disk_store import DiskStore

RECORD_BYTES = 5000
# Of the folder: a few hundred records, so that old ones are removed while new ones are written.
MAX_BYTES = 2 << 20


def key_of(number: int) -> bytes:
    """The key of a record."""
    return number.to_bytes(32, "little")


def record_of(number: int, size: int = RECORD_BYTES) -> np.ndarray:
    """The bytes of a record."""
    return np.random.default_rng(number).integers(0, 256, size, dtype=np.uint8)


def main() -> None:
    """Put records, and say a number whenever all up to it are written."""
    assert "torch" not in sys.modules
    folder, keep = sys.argv[1], sys.argv[2] == "keep"
    store = DiskStore(folder, MAX_BYTES, record_bytes=RECORD_BYTES, keep=keep)
    for number in itertools.count(int(sys.argv[3])):
        store.put(key_of(number), 16, record_of(number))
        if number % 8 == 0:
            store.flush(10)
            print(number, flush=True)


if __name__ == "__main__":
    main()
