"""Peers on the workloads W1 to W5, on the same GPU: a process of its own for each.

    python -m cotrt.bench.gpu_peers transformers FOLDER

prints one JSON record a workload. Prompts are those that cotrt gets; nothing is cached from one
repetition to the next but what the engine itself keeps.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from cotrt.bench.workloads import FULL, TEMPERATURE, TOY, Sizes, tokens

PEERS = ("transformers", "vllm")

# Prompts, tokens out, whether they are sampled, sequences a prompt: the new sequences.
Generate = Callable[[list[list[int]], int, bool, int], list[list[int]]]


def transformers_generate(folder: str, device: str) -> tuple[Generate, int, str]:
    """`model.generate` with a static batch, bfloat16 and its SDPA attention."""
    import torch
    from transformers import AutoModelForCausalLM, __version__

    loader: Any = AutoModelForCausalLM
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = loader.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    model = model.to(device).eval()
    model.generation_config.eos_token_id = None

    def generate(prompts: list[list[int]], out: int, samples: bool, each: int) -> list[list[int]]:
        ids = torch.tensor(prompts, device=device)
        options: dict[str, Any] = {"do_sample": samples, "num_return_sequences": each}
        if samples:
            options |= {"temperature": TEMPERATURE, "top_k": 0, "top_p": 1.0}
        with torch.inference_mode():
            made = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=out,
                min_new_tokens=out,
                eos_token_id=None,
                pad_token_id=2,
                **options,
            )
        return made.tolist()  # type: ignore[no-any-return]

    return generate, model.config.vocab_size, f"transformers {__version__}"


def vllm_generate(folder: str, device: str) -> tuple[Generate, int, str]:
    """vLLM's engine in this process, prefix caching on."""
    import os

    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    vllm: Any = importlib.import_module("vllm")
    engine = vllm.LLM(folder, dtype="bfloat16", max_model_len=2048, enable_prefix_caching=True)

    def generate(prompts: list[list[int]], out: int, samples: bool, each: int) -> list[list[int]]:
        params = vllm.SamplingParams(
            temperature=TEMPERATURE if samples else 0.0,
            max_tokens=out,
            n=each,
            ignore_eos=True,
            detokenize=False,
        )
        sent = [{"prompt_token_ids": prompt} for prompt in prompts]
        results = engine.generate(sent, params, use_tqdm=False)
        return [
            prompt + list(output.token_ids)
            for prompt, result in zip(prompts, results)
            for output in result.outputs
        ]

    size = engine.llm_engine.model_config.get_vocab_size()
    return generate, size, f"vllm {vllm.__version__}"


def run(generate: Generate, name: str, repetition: object, sizes: Sizes, vocab_size: int) -> float:
    """Seconds of workload `name`, written as a user of such an engine writes it."""

    def ids(tail: str, count: int) -> list[int]:
        return tokens(f"{name}/{repetition}{tail}", count, vocab_size)

    start = time.perf_counter()
    if name == "W1":
        n, length, out = sizes.w1
        generate([ids(f"/{i}", length) for i in range(n)], out, False, 1)
    elif name == "W2":
        length, n, out = sizes.w2
        generate([ids("", length)], out, True, n)
    elif name == "W3":
        length, depth, keep, fan, step = sizes.w3
        frontier = generate([ids("", length)], step, True, keep * fan)[:keep]
        for _ in range(depth - 1):
            grown = generate(frontier, step, True, fan)
            frontier = [grown[i * fan + i % fan] for i in range(keep)]
    elif name == "W4":
        sessions, turns, user, out = sizes.w4
        talks: list[list[int]] = [[] for _ in range(sessions)]
        for turn in range(turns):
            talks = [talk + ids(f"/{turn}/{s}", user) for s, talk in enumerate(talks)]
            talks = generate(talks, out, False, 1)
    else:
        length, out = sizes.w5
        generate([ids("", length)], out, False, 1)
    return time.perf_counter() - start


def main(argv: Sequence[str]) -> int:
    """``PEER FOLDER [repetitions] [toy]``: a JSON line for each workload."""
    peer, folder = argv[0], argv[1]
    repetitions, toy = int(argv[2]) if len(argv) > 2 else 2, argv[3:] == ["toy"]
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    made = {"transformers": transformers_generate, "vllm": vllm_generate}[peer](folder, device)
    generate, vocab_size, version = made
    for name in ("W5", "W2", "W3", "W1", "W4"):
        run(generate, name, "warm", TOY, vocab_size)
        sizes = TOY if toy else FULL
        seconds = [run(generate, name, i, sizes, vocab_size) for i in range(repetitions)]
        print(json.dumps({"engine": version, "workload": name, "runs_s": seconds}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
