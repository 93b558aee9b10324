"""How far int8 and bfloat16 weights move a model's predictions: the table of docs/kernels.md.

    python scripts/cpu_weight_error.py [--model smollm2-135m] [--tokens 1448]

Every position of a text (README.md and docs/structure.md of this checkout) is scored in one prompt.
Against float32 on the same kernels: how far the logprob of the text's next token moves (mean of the
absolute change, its 99th percentile, mean with its sign), in how many positions the likeliest token
stays, and the KL divergence from the float32 distribution.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))

from cpu_kernel_figures import make_plan, step_plan

from cotrt import LLM

PIECE = 128  # rows of logits at once
RUNS: dict[str, dict[str, str | None]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "torch bfloat16": {"dtype": "bfloat16", "attention_backend": "reference"},
}


def text_ids(llm: LLM, count: int) -> list[int]:
    root = Path(__file__).parent.parent
    text = "\n".join((root / name).read_text() for name in ("README.md", "docs/structure.md"))
    ids = [int(i) for i in llm.tokenizer.encode(text)][:count]
    assert len(ids) == count, f"the text has {len(ids)} tokens, --tokens asks for {count}"
    return ids


def logprobs(llm: LLM, ids: list[int]) -> torch.Tensor:
    """``[tokens, vocab]`` of one prompt, computed in pieces as chunked prefill does."""
    model = llm._runtime.engine.model
    out = torch.empty(len(ids), llm.vocab_size)
    for begin in range(0, len(ids), PIECE):
        rows = list(range(begin, min(begin + PIECE, len(ids))))
        whole = [(0, 0, rows[-1] + 1, True, list(range(len(rows))))]
        plan, _ = make_plan(rows, whole)
        step = step_plan(plan, llm.vocab_size, list(range(len(rows))))
        step.input_ids[:] = np.array(ids[begin : begin + len(rows)], np.int32)
        out[rows] = torch.log_softmax(model.run(step), dim=1)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=1448)
    options = parser.parse_args()
    exact, ids = None, []
    print("| weights | mean | 99% | signed | likeliest stays | KL |\n|---|---|---|---|---|---|")
    for name, settings in RUNS.items():
        with LLM(
            options.model, device="cpu", block_size=16, kv_cache_memory_bytes=256 << 20, **settings
        ) as llm:
            ids = ids or text_ids(llm, options.tokens)
            found = logprobs(llm, ids)
        if exact is None:
            exact = found
            continue
        next_ids = torch.tensor(ids[1:]).unsqueeze(1)
        rows = range(len(ids) - 1)
        change = found[:-1].gather(1, next_ids) - exact[:-1].gather(1, next_ids)
        stays = np.mean([int(found[i].argmax()) == int(exact[i].argmax()) for i in rows])
        divergence = np.mean(
            [
                float((exact[i].double().exp() * (exact[i].double() - found[i].double())).sum())
                for i in rows
            ]
        )
        print(
            f"| {name} | {change.abs().mean():.3f} | {change.abs().quantile(0.99):.2f} "
            f"| {change.mean():+.3f} | {100 * stays:.1f}% | {divergence:.5f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
