"""Random programs on a tiny random Llama in float32: KV that is really read by attention."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from isolation import shared_fixture

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "models"))
from checkpoints import make_model, save

from cotrt import LLM, Branch, SamplingParams

NUM_PROGRAMS, NUM_STEPS, BLOCK_SIZE = 60, 40, 8
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("llama", std=0.15), tmp_path_factory.mktemp("llama"))


def open_llm(folder: Path, num_tokens: int, **options: Any) -> LLM:
    kv_bytes = 2 * 2 * 2 * 16 * 4  # K and V, layers, KV heads, head_dim, float32
    llm = LLM(
        folder,
        tokenizer=_Bytes(),
        dtype="float32",
        block_size=BLOCK_SIZE,
        kv_cache_memory_bytes=num_tokens * kv_bytes,
        **options,
    )
    assert llm.memory().total == num_tokens // BLOCK_SIZE
    return llm


class _Bytes:
    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(i) for i in ids)


@shared_fixture()
def scratch(folder: Path) -> Iterator[LLM]:
    """A large engine that finds nothing of earlier prompts."""
    with open_llm(folder, 1 << 14, enable_prefix_caching=False) as llm:
        yield llm


class Program:
    """One random program; `expect` collects what is to be computed again from scratch."""

    def __init__(self, llm: LLM, seed: int) -> None:
        self.llm = llm
        self.pick = random.Random(seed)
        self.branches = [llm.branch(self.ids(20))]
        self.running: list[tuple[Branch, int, Any]] = []
        self.scored: list[tuple[list[int], list[list[int]], Any]] = []

    def ids(self, most: int) -> list[int]:
        return [self.pick.randrange(3, 200) for _ in range(self.pick.randint(1, most))]

    def idle(self) -> Branch | None:
        busy = {id(branch) for branch, _, g in self.running if not g.done}
        free = [b for b in self.branches if id(b) not in busy and len(b)]
        return self.pick.choice(free) if free else None

    def step(self) -> None:
        branch, what = self.idle(), self.pick.random()
        if branch is None or what < 0.1:
            self.branches.append(self.llm.branch(self.ids(30)))
        elif what < 0.3:
            at = self.pick.choice([None, self.pick.randint(1, len(branch))])
            self.branches += branch.fork(self.pick.randint(1, 3), at=at)
        elif what < 0.4 and len(branch) < 100:
            branch.extend(self.ids(20))
        elif what < 0.65 and len(branch) < 110:
            count = self.pick.randint(1, 12)
            self.running.append(
                (branch, len(branch), branch.generate(temperature=0.0, max_tokens=count))
            )
        elif what < 0.75:
            options = [self.ids(9) for _ in range(3)]
            self.scored.append((branch.token_ids, options, branch.score(options)))
        elif what < 0.85:
            self.settle()
            branch.truncate(self.pick.randint(1, len(branch)))
        elif what < 0.9 and self.running:
            self.running[self.pick.randrange(len(self.running))][2].cancel()
        elif what < 0.95 and len(self.branches) > 3:
            self.settle()
            branch.prune()
            self.branches = [b for b in self.branches if b.alive]
        else:
            self.settle()

    def settle(self) -> None:
        """Wait for everything, and compare it with the same from scratch."""
        for _, _, generation in self.running:
            generation.result()
        for _, _, handle in self.scored:
            handle.result()

    def check(self, scratch: LLM) -> None:
        self.settle()
        prompts = [(b.token_ids, b.logprobs) for b in self.branches]
        outs = scratch.generate(
            [ids for ids, _ in prompts], SamplingParams(max_tokens=0, prompt_logprobs=1)
        )
        for (ids, logprobs), out in zip(prompts, outs, strict=True):
            for position in range(1, len(ids)):
                if logprobs[position] is None:
                    continue
                entry = out.prompt_logprobs[position]
                best = max(value.logprob for value in entry.values())
                # Greedy: the token is the best one, or as good as the best by rounding.
                assert entry[ids[position]].logprob > best - TOLERANCE
                assert abs(entry[ids[position]].logprob - logprobs[position]) < TOLERANCE
        for ids, options, handle in self.scored:
            again = scratch.branch(ids).score(options).result()
            for score, other in zip(handle.result(), again, strict=True):
                assert score.logprobs == pytest.approx(other.logprobs, abs=TOLERANCE)


@pytest.mark.parametrize("group", range(6))
def test_branches_of_random_programs_equal_the_same_tokens_from_scratch(
    folder: Path, scratch: LLM, group: int
) -> None:
    torch.set_num_threads(2)
    each, computed_again = NUM_PROGRAMS // 6, 0
    for number in range(group * each, (group + 1) * each):
        blocks = [20, 24, 32, 128][number % 4]
        budget = [16, 64, 2048][number % 3]
        with open_llm(folder, blocks * BLOCK_SIZE, max_num_batched_tokens=budget) as llm:
            program = Program(llm, number)
            for _ in range(NUM_STEPS):
                program.step()
            program.check(scratch)
            for branch in program.branches:
                branch.prune()
            memory = llm.memory()
            assert (memory.in_use, memory.free + memory.cached) == (0, blocks)
            computed_again += llm.metrics["preemptions"] + llm.metrics["recomputed_tokens"]
    assert computed_again > 0
