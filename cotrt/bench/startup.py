"""`python -m cotrt.bench start`: seconds to a model and to a first token, and the memory it takes.

Each repetition is a process of its own; files are in the page cache after the first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence

_PROGRAM = """
import json, sys, time
import torch, transformers, tokenizers
def private():
    with open("/proc/self/smaps_rollup") as file:
        return sum(int(l.split()[1]) for l in file if l.startswith("Private_")) * 1024
before = private()
began = time.perf_counter()
from cotrt import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype="bfloat16", kv_cache_memory_bytes=1 << 28)
loaded = time.perf_counter() - began
llm.generate("Hello", SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
model = llm._runtime.engine.model
used = llm.memory().in_use + llm.memory().cached
print(json.dumps({
    "load_s": loaded,
    "private_bytes": private() - before,
    "weight_bytes": getattr(model, "weight_bytes", 0),
    "pool_bytes": used * llm.memory().block_size * model.kv_bytes_per_token,
}))
"""

_FIRST_TOKEN = """
import sys
from cotrt import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype="bfloat16", kv_cache_memory_bytes=1 << 28)
llm.generate("Hello", SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
"""


def main(argv: Sequence[str]) -> int:
    """Print medians over fresh processes."""
    parser = argparse.ArgumentParser(
        prog="python -m cotrt.bench start", description="Start-up time and memory of a model."
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--reps", type=int, default=5)
    options = parser.parse_args(argv)
    import time

    runs, firsts = [], []
    for _ in range(options.reps + 1):
        said = subprocess.run(
            [sys.executable, "-c", _PROGRAM, options.model],
            check=True,
            capture_output=True,
            text=True,
        )
        runs.append(json.loads(said.stdout))
        began = time.perf_counter()
        subprocess.run(
            [sys.executable, "-c", _FIRST_TOKEN, options.model], check=True, capture_output=True
        )
        firsts.append(time.perf_counter() - began)
    load = statistics.median(run["load_s"] for run in runs[1:])
    private = statistics.median(run["private_bytes"] for run in runs[1:])
    needed = runs[0]["weight_bytes"] + runs[0]["pool_bytes"]
    print(f"LLM({options.model!r}), torch imported: {load:.2f} s")
    print(f"process start to the end of a one-token program: {statistics.median(firsts[1:]):.2f} s")
    print(
        f"private memory beyond torch and tokenizers: {private / 2**20:.0f} MiB, "
        f"{private / needed:.2f}x weights and filled pool ({needed / 2**20:.0f} MiB)"
    )
    return 0
