"""Kill a process that saves branches, at random moments, and look at what is left each time.

    python scripts/kill_saves.py 200

Run at the root of the source tree. The writer has no torch, so that a round takes a moment.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "saved"))

from killing import kill_while_saving


def main() -> None:
    """Kill, look, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("times", type=int, nargs="?", default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        whole, left = kill_while_saving(Path(folder), options.times, options.seed)
        seconds = time.perf_counter() - start
    print(
        f"{options.times} kills in {seconds:.0f} s: {whole} times a whole file was there, "
        f"{options.times - whole} times none, {left} times a leftover that the next save removed; "
        "no half-written file, ever"
    )


if __name__ == "__main__":
    main()
