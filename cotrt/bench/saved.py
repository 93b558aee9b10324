"""`python -m cotrt.bench saved`: loading a long branch against computing it.

A random checkpoint of SmolLM2-135M's shape with a longer context is made in a temporary folder; it
has some of the thirty layers, for both times are proportional to them. A branch is computed and
saved; then each round starts an `LLM`, and times the first token of the branch loaded from the
file (its check included) and of the same tokens computed, one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

# SmolLM2-135M, but for the context and the number of layers.
_HIDDEN, _HEADS, _KV_HEADS, _INTERMEDIATE, _VOCAB = 576, 9, 3, 1536, 49152


def main(argv: Sequence[str]) -> int:
    """Measure and print.

    Returns:
        The exit code, 0.
    """
    parser = argparse.ArgumentParser(
        prog="python -m cotrt.bench saved", description=__doc__.partition("\n\n")[0]
    )
    parser.add_argument("--tokens", type=int, default=30_000, help="tokens of the branch")
    parser.add_argument("--layers", type=int, default=12, help="layers of the model (of 30)")
    parser.add_argument("--reps", type=int, default=3, help="loads; it is computed once")
    parser.add_argument("--hidden", type=int, default=_HIDDEN, help=argparse.SUPPRESS)
    parser.add_argument("--vocab", type=int, default=_VOCAB, help=argparse.SUPPRESS)
    parser.add_argument("--dtype", default="bfloat16", help="of weights and KV")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(
            Path(folder),
            layers=options.layers,
            hidden=options.hidden,
            vocab=options.vocab,
            context=max(32768, options.tokens + 64),
        )
        report = measure(Path(folder), options.tokens, options.reps, options.dtype)
    report = {"layers": options.layers, "hidden": options.hidden, **report}
    print(table(report))
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n")
    return 0


def make_checkpoint(folder: Path, *, layers: int, hidden: int, vocab: int, context: int) -> None:
    """Random weights in bfloat16, small enough for logits that stay finite."""
    import torch
    from safetensors.torch import save_file

    heads, kv_heads, head_dim = _HEADS, _KV_HEADS, hidden // _HEADS
    intermediate = _INTERMEDIATE * hidden // _HIDDEN
    generator = torch.Generator().manual_seed(0)

    def weight(rows: int, columns: int) -> torch.Tensor:
        values: torch.Tensor = torch.randn(rows, columns, generator=generator) * columns**-0.5
        return values.bfloat16()

    tensors = {
        "model.embed_tokens.weight": weight(vocab, hidden),
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
    }
    for layer in range(layers):
        shapes = {
            "self_attn.q_proj": (heads * head_dim, hidden),
            "self_attn.k_proj": (kv_heads * head_dim, hidden),
            "self_attn.v_proj": (kv_heads * head_dim, hidden),
            "self_attn.o_proj": (hidden, heads * head_dim),
            "mlp.gate_proj": (intermediate, hidden),
            "mlp.up_proj": (intermediate, hidden),
            "mlp.down_proj": (hidden, intermediate),
        }
        for name, shape in shapes.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = weight(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            ones = torch.ones(hidden, dtype=torch.bfloat16)
            tensors[f"model.layers.{layer}.{name}.weight"] = ones
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "rope_theta": 100_000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(settings))


def measure(folder: Path, num_tokens: int, reps: int, dtype: str) -> dict[str, Any]:
    """Seconds to the first token, computed and loaded, and the size of the file."""
    from cotrt import LLM

    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    ids = np.random.default_rng(0).integers(3, vocab, num_tokens).tolist()
    path = folder / "branch.safetensors"

    def start() -> LLM:
        llm = LLM(folder, dtype=dtype)
        llm.branch(ids[-300:]).generate(max_tokens=2).result()  # what the first call costs
        llm.branch(ids[1:2]).generate(max_tokens=2).result()
        return llm

    with start() as llm:
        kernels = llm.kernels
        began = time.perf_counter()
        branch = llm.branch(ids)
        first = _next_token(branch)
        computed = time.perf_counter() - began
        branch.truncate(num_tokens)
        began = time.perf_counter()
        branch.save(path)
        saving = time.perf_counter() - began
    loads, first_tokens = [], []
    for _ in range(reps):
        with start() as llm:
            before = llm.metrics
            began = time.perf_counter()
            branch = llm.load_branch(path)
            checked = time.perf_counter() - began
            token = _next_token(branch)
            loads.append(checked)
            first_tokens.append(time.perf_counter() - began)
            after = llm.metrics
        computed_again = after["prompt_tokens_computed"] - before["prompt_tokens_computed"]
        assert token == first, "the loaded branch says something else"
        assert computed_again == 0, f"{computed_again} prompt tokens were computed again"
    return {
        "tokens": num_tokens,
        "dtype": dtype,
        "kernels": kernels,
        "threads": os.cpu_count(),
        "file_bytes": path.stat().st_size,
        "computed_s": computed,
        "saving_s": saving,
        "checked_s": loads,
        "loaded_s": first_tokens,
        "ratio": computed / statistics.median(first_tokens),
    }


def _next_token(branch: Any) -> int:
    output = branch.generate(max_tokens=1, temperature=0, ignore_eos=True).result()
    token: int = output.token_ids[0]
    return token


def table(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    size = report["file_bytes"] / (1 << 20)
    checked, loaded = (statistics.median(report[name]) for name in ("checked_s", "loaded_s"))
    title = (
        f"A branch of {report['tokens']:,} tokens, {report['layers']} layers of SmolLM2-135M's "
        f"shape (hidden {report['hidden']}) in {report['dtype']}, kernels {report['kernels']}, "
        f"{report['threads']} processors; its file has {size:,.0f} MiB:"
    )
    return "\n".join(
        [
            title,
            "",
            "| to the first token | seconds |",
            "| --- | ---: |",
            f"| computed | {report['computed_s']:.2f} |",
            f"| loaded (median of {len(report['loaded_s'])}) | {loaded:.2f} |",
            f"| of that, checking the file | {checked:.2f} |",
            f"| saving it | {report['saving_s']:.2f} |",
            "",
            f"Loading is {report['ratio']:.1f} times as fast as computing.",
        ]
    )
