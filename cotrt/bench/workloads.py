"""The workloads of the CPU benchmark, as token ids and calls of the public API.

    W1  64 prompts of 64 tokens, 128 greedy tokens each, all at once
    W2  self-consistency: a prompt of 1,024 tokens, 32 samples of 128, temperature 0.8
    W3  tree search: a root of 512, depth 6, 16 children of 32 sampled tokens a level, 4 kept
    W4  8 chats of 6 turns in step, 128 new tokens and 64 greedy ones a turn
    W5  a single stream: a prompt of 64, 128 greedy tokens
    W6  beam search: width 8, a prompt of 256, 64 tokens
    P1  prompt processing: one prompt of 2,000 tokens, one token out
    P2  prompt processing: 16 prompts of 512 tokens at once, one token out each

End-of-sequence is ignored, so that every engine makes the same number of tokens. Prompts depend
on (workload, repetition) only. What P1 and P2 count are the tokens of their prompts.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cotrt import LLM, Branch

TEMPERATURE = 0.8


@dataclass(frozen=True)
class Sizes:
    """How large each workload is; the defaults are those that peers are measured with."""

    w1: tuple[int, int, int] = (64, 64, 128)  # prompts, prompt tokens, tokens out
    w2: tuple[int, int, int] = (1024, 32, 128)  # prompt tokens, samples, tokens out
    w3: tuple[int, int, int, int, int] = (512, 6, 4, 4, 32)  # prompt, depth, keep, fan, step
    w4: tuple[int, int, int, int] = (8, 6, 128, 64)  # sessions, turns, user tokens, tokens out
    w5: tuple[int, int] = (64, 128)  # prompt tokens, tokens out
    w6: tuple[int, int, int] = (256, 8, 64)  # prompt tokens, width, tokens out
    p1: tuple[int, int] = (1, 2000)  # prompts, prompt tokens
    p2: tuple[int, int] = (16, 512)  # prompts, prompt tokens


FULL = Sizes()
TOY = Sizes(
    (4, 16, 8), (48, 4, 8), (32, 2, 2, 2, 8), (2, 2, 16, 8), (16, 16), (24, 3, 6), (1, 40), (3, 16)
)


@dataclass(frozen=True)
class Run:
    """One timed repetition: wall seconds, tokens, and time to the first one if it counts."""

    seconds: float
    out_tokens: int
    ttft: float | None = None


def tokens(key: str, count: int, vocab_size: int) -> list[int]:
    """`count` token ids fixed by `key`."""
    source = random.Random(key)
    return [source.randrange(100, min(49000, vocab_size)) for _ in range(count)]


def run(llm: LLM, name: str, repetition: object, sizes: Sizes = FULL) -> Run:
    """Run workload `name` once."""
    vocab_size = llm.vocab_size

    def ids(tail: str, count: int) -> list[int]:
        return tokens(f"{name}/{repetition}{tail}", count, vocab_size)

    work: Callable[[], tuple[int, float | None]]
    if name == "W1":
        n, length, out = sizes.w1
        prompts = [ids(f"/{i}", length) for i in range(n)]
        work = lambda: _batch(llm, prompts, out)  # noqa: E731
    elif name == "W2":
        length, n, out = sizes.w2
        prompt = ids("", length)
        work = lambda: _samples(llm, prompt, n, out)  # noqa: E731
    elif name == "W3":
        prompt = ids("", sizes.w3[0])
        work = lambda: _tree(llm, prompt, *sizes.w3[1:])  # noqa: E731
    elif name == "W4":
        sessions, turns, user, out = sizes.w4
        talk = [[ids(f"/{t}/{s}", user) for s in range(sessions)] for t in range(turns)]
        work = lambda: _chats(llm, talk, out)  # noqa: E731
    elif name == "W5":
        prompt = ids("", sizes.w5[0])
        work = lambda: _batch(llm, [prompt], sizes.w5[1])  # noqa: E731
    elif name in ("P1", "P2"):
        n, length = sizes.p1 if name == "P1" else sizes.p2
        prompts = [ids(f"/{i}", length) for i in range(n)]
        work = lambda: (_batch(llm, prompts, 1)[0] * length, None)  # noqa: E731
    else:
        length, width, out = sizes.w6
        prompt = ids("", length)
        work = lambda: _beams(llm, prompt, width, out)  # noqa: E731
    start = time.perf_counter()
    made, ttft = work()
    return Run(time.perf_counter() - start, made, ttft)


def _batch(llm: LLM, prompts: list[list[int]], out: int) -> tuple[int, None]:
    from cotrt import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=out, ignore_eos=True)
    results = llm.generate(prompts, params, use_tqdm=False)
    return sum(len(r.outputs[0].token_ids) for r in results), None


def _grow(branches: list[Branch], step: int) -> int:
    running = [
        b.generate(max_tokens=step, temperature=TEMPERATURE, ignore_eos=True) for b in branches
    ]
    return sum(len(g.result().token_ids) for g in running)


def _samples(llm: LLM, prompt: list[int], n: int, out: int) -> tuple[int, None]:
    with llm.branch(prompt) as root:
        return _grow(list(root.fork(n)), out), None


def _tree(
    llm: LLM, prompt: list[int], depth: int, keep: int, fan: int, step: int
) -> tuple[int, None]:
    with llm.branch(prompt) as root:
        children = list(root.fork(keep * fan))
        made = _grow(children, step)
        frontier, dropped = children[:keep], children[keep:]
        for level in range(depth):
            for branch in dropped:
                branch.prune()
            if level == depth - 1:
                break
            families = [list(b.fork(fan)) for b in frontier]
            made += _grow([child for family in families for child in family], step)
            frontier = [family[i % fan] for i, family in enumerate(families)]
            dropped = [c for family in families for c in family if c not in frontier]
        return made, None


def _chats(llm: LLM, talk: list[list[list[int]]], out: int) -> tuple[int, float]:
    branches = [llm.branch(ids) for ids in talk[0]]
    made, ttft = 0, 0.0
    for turn, new in enumerate(talk):
        if turn:
            for branch, ids in zip(branches, new):
                branch.extend(ids)
        start = time.perf_counter()
        running = [b.generate(max_tokens=out, temperature=0, ignore_eos=True) for b in branches]
        first = []
        for generation in running:
            next(iter(generation))
            first.append(time.perf_counter() - start)
        made += sum(len(g.result().token_ids) for g in running)
        ttft = sum(first) / len(first)
    for branch in branches:
        branch.prune()
    return made, ttft


def _beams(llm: LLM, prompt: list[int], width: int, out: int) -> tuple[int, None]:
    from cotrt import BeamSearchParams

    found = llm.beam_search(
        [prompt], BeamSearchParams(beam_width=width, max_tokens=out, ignore_eos=True)
    )
    return sum(len(s.tokens) for s in found[0].sequences), None
