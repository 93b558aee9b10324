"""Mixed work on one LLM for an hour: private memory stays flat, and nothing is left over.

    python scripts/soak.py --minutes 60
    python scripts/soak.py --minutes 0.3 --model smollm2-135m

Searches, chats that come and go, streams that are dropped, cancelled batches, scores, and branches
that are saved and loaded again, in four threads, a pool that is too small for them and a disk tier
that is full within minutes. Private memory is sampled from /proc, a sample a minute goes to stderr;
after the first sixth of the time it may not grow by more than 1%.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import CancelledError
from functools import partial
from pathlib import Path
from typing import Any

from cotrt import (
    LLM,
    BeamSearchParams,
    CotrtError,
    InvalidRequestError,
    SamplingParams,
    search,
)
from cotrt.testing import ScriptedModel
from cotrt.tree.schedule.counting import SeenTokens

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
MAX_GROWTH = 0.01


def letters(ids: list[int]) -> dict[int, float]:
    """Words of small letters that depend on all that came before, and now and then an end."""
    word = hash(tuple(ids)) & ((1 << 62) - 1)
    weights = {97 + i: 1.0 + (word >> 2 * i & 3) for i in range(26)}
    return {**weights, 10: 4.0, 32: 6.0, 48 + word % 10: 1.0, 0: 0.5}


class Soak:
    """What the workers share."""

    def __init__(self, llm: LLM, folder: Path, deadline: float) -> None:
        self.llm = llm
        self.folder = folder
        self.deadline = deadline
        self.counts: Counter[str] = Counter()
        self.failures: list[BaseException] = []

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.deadline or bool(self.failures)


def params(pick: random.Random, most: int = 40) -> SamplingParams:
    return SamplingParams(
        max_tokens=pick.randint(1, most),
        temperature=pick.choice([0.0, 0.7, 1.0]),
        priority=pick.randrange(3),
        logprobs=pick.choice([None, None, 2]),
    )


def prompt(pick: random.Random) -> str:
    """Half of them share a beginning with others; none comes up so often that all is cached."""
    shared = "Once upon a time there was a tree. " * pick.randrange(3)
    return f"{shared}{pick.randrange(10**6)}: how much is it?"


def a_search(soak: Soak, pick: random.Random) -> None:
    how: Callable[..., Any] = pick.choice(
        [
            partial(search.best_of_n, n=4, score=search.mean_logprob),
            partial(search.self_consistency, n=5, extract="number"),
            partial(
                search.step_beam_search,
                width=2,
                branching=2,
                max_steps=4,
                delimiter="\n",
                score=search.mean_logprob,
            ),
        ]
    )
    backend = pick.choice(["asyncio", "trio"])
    search.run(how, soak.llm, prompt(pick), params=params(pick), backend=backend)


def a_chat(soak: Soak, pick: random.Random) -> None:
    with soak.llm.start_chat("Be brief.", chat_template=TEMPLATE) as chat:
        for _ in range(pick.randint(1, 4)):
            reply = chat.send(prompt(pick), params(pick))
            if pick.random() < 0.2:
                reply.cancel()
            reply.result()
            if pick.random() < 0.2:
                chat.undo()


def a_batch(soak: Soak, pick: random.Random) -> None:
    """Children that generate together; some are cut off, some handles are simply dropped."""
    root = soak.llm.branch(prompt(pick))
    work = root.fork(pick.randint(1, 6)).generate(params(pick, 100))
    what = pick.randrange(4)
    if what == 0:
        work.cancel()
    elif what == 1:
        next(iter(work[0]), None)
        root.prune()
    elif what == 2:
        work.result()
    # else the work runs on, and nobody has a handle of it


def a_score(soak: Soak, pick: random.Random) -> None:
    with soak.llm.branch(prompt(pick)) as branch:
        branch.score(["yes", "no", "maybe so"], given=" so: ").result()
        branch.choose(["yes", "no"], given=" then ").result()
        branch.truncate(pick.randint(1, len(branch)))
        branch.generate(params(pick)).result()


def some_beams(soak: Soak, pick: random.Random) -> None:
    soak.llm.beam_search(prompt(pick), BeamSearchParams(beam_width=3, max_tokens=8))


def a_save(soak: Soak, pick: random.Random) -> None:
    """A branch saved, dropped, loaded, and gone on with."""
    path = soak.folder / f"{threading.get_ident()}.safetensors"
    with soak.llm.branch(prompt(pick)) as branch:
        branch.generate(params(pick)).result()
        branch.save(path)
        ids = branch.token_ids
    with soak.llm.load_branch(path) as loaded:
        assert loaded.token_ids == ids, "a loaded branch has other tokens"
        loaded.generate(params(pick)).result()
    path.unlink()


KINDS: list[Callable[[Soak, random.Random], None]] = [
    a_search,
    a_chat,
    a_batch,
    a_batch,
    a_score,
    some_beams,
    a_save,
]


def work(soak: Soak, seed: int) -> None:
    pick = random.Random(seed)
    while not soak.is_over:
        kind = pick.choice(KINDS)
        try:
            kind(soak, pick)
            soak.counts[kind.__name__] += 1
        except (CotrtError, CancelledError, TimeoutError) as error:
            soak.counts[f"{kind.__name__}: {type(error).__name__}"] += 1
        except BaseException as error:
            soak.failures.append(error)


def private_kib() -> int:
    """What this process has written into memory that no other process sees, swapped or not.

    Clean pages are left out. They are of libraries' files, and count as private for as long as no
    other process maps the same file: they come and go by 8 MiB with other programs that use torch.
    """
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    kept = ("Private_Dirty:", "Swap:")
    return sum(int(line.split()[1]) for line in lines if line.startswith(kept))


def open_llm(model: str, folder: Path) -> tuple[LLM, list[str]]:
    """The LLM, with each option of a tier that this version has."""
    options: dict[str, Any] = {"max_num_seqs": 24}
    if model == "scripted":
        chosen: Any = ScriptedModel(letters, vocab_size=128, eos_token_id=0)
        options["kv_cache_memory_bytes"] = 48 * 16 * 4
        disk_space = 2**-8  # 1,024 records: what is written later pushes others out
    else:
        chosen, disk_space = model, 0.05
        options |= {"kv_cache_memory_bytes": 64 << 20, "max_model_len": 1024}
    missing = []
    try:
        llm = LLM(chosen, **options, disk_space=disk_space, disk_dir=folder)
    except InvalidRequestError as error:
        missing.append(str(error))
        llm = LLM(chosen, **options)
    return llm, missing


def show(seconds: float, kib: int, num_objects: int, num_records: int) -> None:
    """A sample, for whoever looks at a growth while the soak runs."""
    line = (
        f"{seconds / 60:5.1f} min {kib / 1024:7.2f} MiB {num_objects:8d} blocks of Python's "
        f"{num_records:6d} records"
    )
    print(line, file=sys.stderr, flush=True)


def growth(samples: list[tuple[float, int]]) -> float:
    """By how much the last fifth is above what came after the first sixth, as a share.

    Args:
        samples: seconds since the beginning, and what was measured then.
    """
    end = samples[-1][0]
    early = [value for at, value in samples if end / 6 <= at < end / 3]
    late = [value for at, value in samples if at >= end * 0.8]
    return statistics.median(late) / statistics.median(early) - 1


def run(minutes: float, model: str, seed: int, num_threads: int = 4) -> dict[str, Any]:
    """Run it and look at what is left.

    Raises:
        AssertionError: a law is broken, or something is left over.
        BaseException: what a worker met that it should not have.
    """
    samples: list[tuple[float, int, int]] = []  # seconds, KiB, blocks of Python's allocator
    with tempfile.TemporaryDirectory() as name:
        llm, missing = open_llm(model, Path(name) / "tier")
        engine = llm._runtime.engine
        # It keeps hashes of the last million tokens: full within a second, and not an hour.
        engine.scheduler.counters.seen = SeenTokens(1 << 12)
        began = time.monotonic()
        soak = Soak(llm, Path(name), began + 60 * minutes)
        threads = [
            threading.Thread(target=work, args=(soak, 1000 * seed + i)) for i in range(num_threads)
        ]
        for thread in threads:
            thread.start()
        num_lines = 0
        while not soak.is_over:
            time.sleep(min(5.0, 0.6 * minutes))
            samples.append((time.monotonic() - began, private_kib(), sys.getallocatedblocks()))
            if samples[-1][0] >= 60 * num_lines:
                num_lines += 1
                show(*samples[-1], llm.metrics["disk_blocks"])
        for thread in threads:
            thread.join()
        for failure in soak.failures:
            raise failure
        gc.collect()
        while llm.metrics["running"] or llm.metrics["waiting"]:
            if engine.dead is not None:
                raise engine.dead
            time.sleep(0.01)
        llm.memory()  # takes note of the handles that were dropped
        with engine.lock:
            engine.check_invariants()
        memory = llm.memory()
        assert memory.in_use == 0, f"{memory.in_use} blocks are in use"
        assert memory.free + memory.cached == memory.total, f"{memory}"
        metrics = dict(llm.metrics)
        llm.close()
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("cotrt")]
    assert not left, f"threads are left: {left}"
    return {
        "minutes": round((time.monotonic() - began) / 60, 1),
        "model": model,
        "seed": seed,
        "done": dict(sorted(soak.counts.items())),
        "not_there": missing,
        "metrics": metrics,
        "private_mib": [round(samples[0][1] / 1024, 1), round(samples[-1][1] / 1024, 1)],
        "growth": round(growth([(at, kib) for at, kib, _ in samples]), 4),
        "growth_of_python_blocks": round(growth([(at, num) for at, _, num in samples]), 4),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--model", default="scripted", help='"scripted", or what LLM() takes')
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    found = run(options.minutes, options.model, options.seed)
    sys.stdout.write(json.dumps(found, indent=2) + "\n")
    if options.minutes >= 30 and found["growth"] > MAX_GROWTH:
        sys.stdout.write(f"private memory grew by more than {MAX_GROWTH:.0%}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
