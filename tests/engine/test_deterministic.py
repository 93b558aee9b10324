"""deterministic=True: logits after equal tokens are equal to the bit, whatever the engine does."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "models"))
from checkpoints import make_model, save
from recorded_logits import RecordedLogits, open_recorded

from cotrt import LLM, Branch, SamplingParams

VOCAB = 203
KINDS = [
    {"dtype": "float32"},
    {"dtype": "bfloat16"},
    {"dtype": "bfloat16", "quantization": "int8"},
    {"dtype": "float32", "attention_backend": "reference"},
]
IDS = ["float32", "bfloat16", "int8", "torch"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = make_model(
        "qwen3", std=0.12, vocab_size=VOCAB, max_position_embeddings=4096, num_hidden_layers=2
    )
    return save(model, tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(params=KINDS, ids=IDS)
def kind(request: pytest.FixtureRequest) -> dict[str, Any]:
    if request.param.get("quantization") or "attention_backend" not in request.param:
        from cotrt.kernels.cpu.native import missing_reason

        if missing_reason() is not None:
            pytest.skip("the native kernels are not here")
    return dict(request.param)


def ids(count: int, seed: int) -> list[int]:
    return [random.Random(f"{seed}/{i}").randrange(3, VOCAB) for i in range(count)]


def greedy(count: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=3, **more)


def found(outputs: list[Any]) -> list[Any]:
    """Tokens and the bits of their logprobs."""
    return [
        (
            out.outputs[0].token_ids,
            [
                [(t, np.float32(e.logprob).tobytes()) for t, e in entries.items()]
                for entries in [*(out.prompt_logprobs or [])[1:], *out.outputs[0].logprobs]
            ],
        )
        for out in outputs
    ]


def test_a_batch_of_any_size_equals_its_members_alone(folder: Path, kind: dict[str, Any]) -> None:
    record = RecordedLogits()
    prompts = [ids(n, n) for n in [3, 17, 255, 256, 257, 400, 511, 512, 513, 770]]
    prompts += [ids(300, 300)[:200] + ids(n, 7) for n in range(1, 24)]
    params = greedy(4, prompt_logprobs=2)
    with open_recorded(folder, record, enable_prefix_caching=False, load=kind) as llm:
        alone = [found(llm.generate([p], params, use_tqdm=False))[0] for p in prompts]
        for size in (2, 5, 13, 33):
            batch = random.Random(size).sample(range(len(prompts)), size)
            outs = llm.generate([prompts[i] for i in batch], params, use_tqdm=False)
            assert found(outs) == [alone[i] for i in batch]
    assert record.num_again > 4000 and not record.different


@pytest.mark.parametrize("budget", [1, 7, 64, 100, 256, 300, 2048])
def test_a_prompt_in_pieces_of_any_size_equals_one_piece(
    folder: Path, kind: dict[str, Any], budget: int
) -> None:
    record = RecordedLogits()
    prompt = ids(60 if budget == 1 else 700, 1)
    for tokens, block_size in ((4096, 16), (budget, 8), (budget, 64)):
        with open_recorded(
            folder, record, max_num_batched_tokens=tokens, block_size=block_size, load=kind
        ) as llm:
            llm.generate([prompt], greedy(3, prompt_logprobs=0), use_tqdm=False)
    assert record.num_again > 100 and not record.different


class Program:
    """A random program over a few branches that share a long beginning."""

    def __init__(self, llm: LLM, seed: int, most: int) -> None:
        self.llm, self.pick, self.most = llm, random.Random(seed), most
        self.branches = [llm.branch(ids(self.pick.randint(1, most // 2), seed))]
        self.running: list[tuple[Branch, Any]] = []

    def step(self) -> None:
        pick, what = self.pick, self.pick.random()
        busy = {id(branch) for branch, handle in self.running if not handle.done}
        free = [b for b in self.branches if id(b) not in busy]
        if not free:
            return self.settle()
        branch = pick.choice(free)
        if what < 0.25:
            self.branches += branch.fork(pick.randint(1, 5), at=pick.randint(1, len(branch)))
        elif what < 0.45 and len(branch) < self.most - 60:
            branch.extend(ids(pick.randint(1, 60), pick.randint(0, 3)))
        elif what < 0.75 and len(branch) < self.most:
            count = pick.randint(1, 20)
            self.running.append((branch, branch.generate(temperature=1.0, max_tokens=count)))
        elif what < 0.85:
            options = [ids(n, n) for n in (3, 9)]
            self.running.append((branch, branch.score(options)))
        elif what < 0.95:
            self.settle()
            branch.truncate(pick.randint(1, len(branch)))
        elif len(self.branches) > 3:
            self.settle()
            branch.prune()
            self.branches = [b for b in self.branches if b.alive]

    def settle(self) -> None:
        for _, handle in self.running:
            handle.result()
        self.running.clear()


def test_random_programs_and_every_path_of_theirs_from_scratch(
    folder: Path, kind: dict[str, Any]
) -> None:
    record = RecordedLogits()
    most = 620
    computed_again = 0
    for seed in range(6 if kind == KINDS[0] else 3):
        # Pools that hold all, and such that are too small: KV is dropped and computed again.
        pool = [1 << 14, 1024, 768][seed % 3]
        with open_recorded(
            folder,
            record,
            pool,
            block_size=[16, 8, 32, 256][seed % 4],
            max_num_batched_tokens=[2048, 96, 300][seed % 3],
            enable_prefix_caching=seed % 2 == 0,
            seed=seed,
            load=kind,
        ) as llm:
            program = Program(llm, seed, most)
            for _ in range(60):
                program.step()
            program.settle()
            paths = [b.token_ids for b in program.branches if len(b) > 1]
            computed_again += llm.metrics["recomputed_tokens"]
        with open_recorded(folder, record, enable_prefix_caching=False, load=kind) as llm:
            for path in paths[:8]:
                llm.generate([path], greedy(1, prompt_logprobs=0), use_tqdm=False)
    assert record.num_again > 1000 and not record.different
    assert computed_again > 0


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_new_process_finds_the_same_bits(
    folder: Path, tmp_path: Path, kind: dict[str, Any], threads: int
) -> None:
    """And on the native kernels with any number of threads."""
    code = f"""
import sys
sys.path[:0] = [{str(Path(__file__).parent)!r}]
from test_deterministic import bits_of_a_run
from pathlib import Path
print(bits_of_a_run(Path({str(folder)!r}), {kind!r}, {threads}))
"""
    if "attention_backend" in kind and threads > 1:
        pytest.skip("torch cuts its products by the number of threads")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent.parent)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    if threads == 1:
        import torch

        torch.set_num_threads(1)
    assert done.stdout.strip().splitlines()[-1] == bits_of_a_run(folder, kind, 1)


def bits_of_a_run(folder: Path, kind: dict[str, Any], threads: int) -> str:
    from cotrt.kernels.cpu.native import missing_reason, set_num_threads

    if missing_reason() is None:
        set_num_threads(threads)
    try:
        record = RecordedLogits()
        with open_recorded(folder, record, load=kind) as llm:
            llm.generate([ids(300, 3), ids(40, 4)], greedy(3, prompt_logprobs=0), use_tqdm=False)
        return str(sorted((path, bits.hex()) for path, bits in record.bits.items()))
    finally:
        if missing_reason() is None:
            set_num_threads(None)
