"""Kill a writer of saved branches, or of a prefix cache, at random moments; look what is left.

    python scripts/kill_writers.py --what saves --kills 200
    python scripts/kill_writers.py --what cache --kills 200

Run in the source tree. The writers have no torch, so that a round takes a moment.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / part) for part in (".", "tests/saved", "tests/engine/records")]

from killing import kill_while_saving  # noqa: E402
from killing_cache import kill_while_caching  # noqa: E402


def saves(folder: Path, kills: int, seed: int) -> str:
    """What was found of saved branches."""
    whole, left = kill_while_saving(folder, kills, seed)
    return (
        f"{whole} times a whole file was there, {kills - whole} times none, {left} times a "
        "leftover that the next save removed; no half-written file, ever"
    )


def cache(folder: Path, kills: int, seed: int) -> str:
    """What was found of a prefix cache."""
    whole, left = kill_while_caching(folder, kills, seed)
    return (
        f"{whole} records were read afterwards and all were whole, {left} times there was a "
        "leftover that the next start removed"
    )


def main() -> None:
    """Kill, look, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--what", choices=("saves", "cache"), default="saves")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    run = saves if options.what == "saves" else cache
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        found = run(Path(folder), options.kills, options.seed)
        seconds = time.perf_counter() - start
    print(f"{options.kills} kills in {seconds:.0f} s: {found}")


if __name__ == "__main__":
    main()
