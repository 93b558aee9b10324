"""Saves random trees to one path for ever, without torch; made to be killed."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from saved_trees import SHAPE, random_kv, random_tree

from cotrt.saved.writer import write

if __name__ == "__main__":
    assert "torch" not in sys.modules
    path, seed = sys.argv[1], int(sys.argv[2])
    trees = [random_tree(seed * 8 + i, tokens=2000) for i in range(8)]
    files = [(tree, random_kv(seed, tree)) for tree in trees]
    print("begun", flush=True)
    while True:
        for tree, kv in files:
            write(path, tree, kv, shape=SHAPE, fingerprint="a model")
