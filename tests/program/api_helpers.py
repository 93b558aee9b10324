"""Scripted models, a checkpoint whose output is known in advance, and programs in processes."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cotrt
from cotrt import LLM
from cotrt.testing import ScriptedModel

ROOT = Path(cotrt.__file__).resolve().parent.parent
EOS = 0
END = 2  # the starter tokenizer's <|im_end|>

# `` ABCDEFGHIJ 🦊`` in the starter tokenizer's ids, after the last id of ``go:``, and its EOS.
ABCDEFGHIJ = [17638, 33203, 23960, 57, 58]
FOX = [15107, 116, 228]
COLON = 42
RIG_CHAIN = [COLON, *ABCDEFGHIJ, *FOX, END]


def letters(ids: Sequence[int]) -> Mapping[int, float]:
    """Weights of the small letters that depend on every token before."""
    word = hash(tuple(ids)) & ((1 << 62) - 1)
    return {97 + i: 1.0 + (word >> 2 * i & 3) for i in range(26)}


def counting(ids: Sequence[int]) -> Mapping[int, float]:
    """The letter by the position, for ever: a b c ... z a b ..."""
    return {97 + len(ids) % 26: 1.0}


def saying(text: str, after: int) -> Callable[[Sequence[int]], Mapping[int, float]]:
    """`text` from absolute position `after` on, then the end."""
    ids = [*map(ord, text), EOS]
    return lambda path: {ids[min(max(len(path) - after, 0), len(ids) - 1)]: 1.0}


def scripted(
    next_probs: Callable[[list[int]], Mapping[int, float]] = letters, **options: Any
) -> LLM:
    """An LLM over a ScriptedModel whose token i is the character chr(i)."""
    model = {name: options.pop(name) for name in ("tokenizer", "max_model_len") if name in options}
    eos = options.pop("eos_token_id", EOS)
    vocab = options.pop("vocab_size", 320)
    options = {"kv_cache_memory_bytes": 1 << 20, **options}
    return LLM(ScriptedModel(next_probs, vocab_size=vocab, eos_token_id=eos, **model), **options)


class Gate:
    """Next-token weights that hold the engine's steps back while the gate is shut."""

    def __init__(self, probs: Callable[[list[int]], Mapping[int, float]] = counting) -> None:
        self.probs = probs
        self.open = threading.Event()
        self.reached = threading.Event()
        self.open.set()

    def shut(self) -> None:
        self.open.clear()
        self.reached.clear()

    def __call__(self, ids: list[int]) -> Mapping[int, float]:
        self.reached.set()
        assert self.open.wait(60), "nobody opened the gate"
        return self.probs(ids)


def slowly(
    probs: Callable[[list[int]], Mapping[int, float]] = counting, seconds: float = 2e-3
) -> Callable[[list[int]], Mapping[int, float]]:
    """The same weights, a little later."""

    def wait(ids: list[int]) -> Mapping[int, float]:
        time.sleep(seconds)
        return probs(ids)

    return wait


class Nan(float):
    """A probability whose logarithm is NaN: it says that it is above 0."""

    def __new__(cls) -> Nan:
        return float.__new__(cls, float("nan"))

    def __gt__(self, other: object) -> bool:
        return True


def is_idle(llm: LLM) -> bool:
    """Nothing runs, and no live branch or work holds a block."""
    memory, metrics = llm.memory(), llm.metrics
    return metrics["running"] == metrics["waiting"] == memory.in_use == 0


def eventually(question: Callable[[], bool], seconds: float = 20) -> bool:
    """Whether `question` is answered by yes before `seconds` are over."""
    deadline = time.monotonic() + seconds
    while not question():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


PRELUDE = """
import asyncio, gc, os, signal, sys, threading, time
sys.path.insert(0, {here!r})
from api_helpers import *
from cotrt import *
"""


def run_program(
    source: str, *, interrupt: bool = False, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own.

    Args:
        source: Python; `api_helpers` and `cotrt` are imported.
        interrupt: send it a Ctrl-C once it has printed "ready".

    Returns:
        What it printed and its exit code; ``elapsed`` is set to the seconds between the last
        "ready" that it printed and its end.
    """
    here = str(Path(__file__).resolve().parent)
    program = PRELUDE.format(here=here) + textwrap.dedent(source)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-u", "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=here,
    )
    assert process.stdout is not None and process.stderr is not None
    errors: list[str] = []
    reader = threading.Thread(target=lambda: errors.append(process.stderr.read()))
    reader.start()
    killer = threading.Timer(timeout, process.kill)
    killer.start()
    lines, began = [], time.monotonic()
    for line in process.stdout:
        lines.append(line)
        if line == "ready\n":
            began = time.monotonic()
            if interrupt:
                process.send_signal(2)
    code = process.wait()
    elapsed = time.monotonic() - began
    killer.cancel()
    reader.join()
    done = subprocess.CompletedProcess(program, code, "".join(lines), "".join(errors))
    done.elapsed = elapsed  # type: ignore[attr-defined]
    return done


def make_rig(
    folder: Path,
    chain: Sequence[int],
    *,
    extra_vocab: int = 0,
    probs: Mapping[int, Mapping[int, float]] | None = None,
    tokenizer_from: Path | None = None,
    context: int = 512,
    **config: Any,
) -> Path:
    """A checkpoint whose greedy output is known: attention and MLP add nothing.

    Args:
        chain: distinct ids; after each comes the next, almost surely. After the last, and after
            ids that are not in it, every token is as likely.
        extra_vocab: ids beyond the tokenizer's.
        probs: by last token, the probabilities of the next.
        tokenizer_from: a folder whose tokenizer files are copied; default: the starter's.
        config: more entries of config.json.
    """
    import torch
    from safetensors.torch import save_file

    from cotrt.models import starter

    source = tokenizer_from or starter.ensure()
    folder.mkdir(exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (source / name).exists():
            shutil.copy(source / name, folder / name)
    hidden, vocab = 256, 49152 + extra_vocab
    generator = torch.Generator().manual_seed(0)
    embed = torch.nn.functional.normalize(torch.randn(vocab, hidden, generator=generator), dim=1)
    head = torch.zeros(vocab, hidden)
    scale = hidden**0.5  # length of a normalised hidden state
    for token, following in itertools.pairwise(chain):
        head[following] += embed[token] * 100 / scale
    for token, wanted in (probs or {}).items():
        for following, p in wanted.items():
            head[following] += embed[token] * (torch.tensor(p).log().item() + 50) / scale
    tensors = {
        "model.embed_tokens.weight": embed,
        "lm_head.weight": head,
        "model.norm.weight": torch.ones(hidden),
        "model.layers.0.input_layernorm.weight": torch.ones(hidden),
        "model.layers.0.post_attention_layernorm.weight": torch.ones(hidden),
        "model.layers.0.self_attn.q_proj.weight": torch.zeros(hidden, hidden),
        "model.layers.0.self_attn.k_proj.weight": torch.zeros(hidden // 2, hidden),
        "model.layers.0.self_attn.v_proj.weight": torch.zeros(hidden // 2, hidden),
        "model.layers.0.self_attn.o_proj.weight": torch.zeros(hidden, hidden),
        "model.layers.0.mlp.gate_proj.weight": torch.zeros(64, hidden),
        "model.layers.0.mlp.up_proj.weight": torch.zeros(64, hidden),
        "model.layers.0.mlp.down_proj.weight": torch.zeros(hidden, 64),
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": END,
        "torch_dtype": "float32",
        **config,
    }
    settings = {key: value for key, value in settings.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def put_bos_first(source: Path, target: Path) -> Path:
    """A copy of a rig whose tokenizer puts BOS before every text, as its template does."""
    folder = Path(shutil.copytree(source, target))
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [
            {"Sequence": {"id": "A", "type_id": 0}},
            {"Sequence": {"id": "B", "type_id": 0}},
        ],
        "special_tokens": {
            "<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}
        },
    }
    path.write_text(json.dumps(tokenizer))
    return folder
