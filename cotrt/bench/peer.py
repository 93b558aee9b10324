"""Runs a peer's script as it is, with the two prompt workloads added to those that it knows.

    PEER_PYTHON peer.py bench_NAME.py

In the peer's own environment, so it imports nothing of cotrt. The peer's engine and settings are
its script's; P1 and P2 are its own W1 call with one token out. Variables are those of the scripts'
``common.py``, and ``BENCH_PROMPTS``, the sizes of P1 and P2 as JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any


def main(script: Path) -> None:
    """Run `script` with the workloads of its folder's ``common.py`` extended."""
    sys.path[0] = str(script.parent)  # it was the folder of this file
    common: Any = importlib.import_module("common")
    sizes = json.loads(os.environ["BENCH_PROMPTS"])
    known = common.one

    def one(engine: Any, name: str, repetition: object, warm: bool) -> Any:
        if name not in sizes:
            return known(engine, name, repetition, warm)
        count, length = sizes[name]
        prompts = [common.toks(f"{name}/{repetition}/{i}", length) for i in range(count)]
        engine.reset()
        start = time.perf_counter()
        extra = engine.w1(prompts, 1) or {}
        return time.perf_counter() - start, count * length, count * length, extra

    common.one = one
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
