"""Flags for the options of `LLM`, under their own names: ``max_num_seqs`` is --max-num-seqs."""

from __future__ import annotations

import argparse
import logging
from typing import Any

logger = logging.getLogger("cotrt")

# name -> (type, help); the defaults are LLM's own.
_FLAGS: dict[str, tuple[type, str]] = {
    "tokenizer": (str, "folder or hub id of the tokenizer"),
    "revision": (str, "branch, tag or commit of a hub model"),
    "chat_template": (str, "Jinja text, or a file that holds it"),
    "generation_config": (str, '"auto" takes sampling defaults from the model, "vllm" none'),
    "dtype": (str, "auto, float32, bfloat16 or float16"),
    "quantization": (str, "int8: weights in 8 bits (CPU)"),
    "device": (str, "auto, cpu, cuda or cuda:N"),
    "num_threads": (int, "CPU threads of the engine"),
    "seed": (int, "where draws without a seed start"),
    "max_model_len": (int, "tokens that a sequence may have"),
    "block_size": (int, "tokens a KV block"),
    "kv_cache_dtype": (str, "auto: the dtype of the model"),
    "gpu_memory_utilization": (float, "share of a GPU's memory to use"),
    "kv_cache_memory_bytes": (int, "size of the KV pool"),
    "swap_space": (float, "GiB of host memory for KV"),
    "disk_space": (float, "GiB of disk for KV"),
    "disk_dir": (str, "folder of that disk space"),
    "prefix_cache_dir": (str, "folder of a prefix cache that outlives the process"),
    "max_num_seqs": (int, "sequences that run at once"),
    "max_num_batched_tokens": (int, "tokens that one step computes at most"),
    "attention_backend": (str, "auto, reference, cpu or triton"),
    "logprobs_mode": (str, "raw or processed"),
    "saved_key": (str, "file of the key that signs saved branches"),
}
_SWITCHES = {
    "enable_prefix_caching": "reuse KV of earlier prompts",
    "trust_remote_code": "run code that comes with a model",
    "deterministic": "logits bitwise equal whatever else runs",
    "enforce_eager": "no CUDA graphs",
}


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """MODEL, or --model MODEL."""
    parser.add_argument(
        "model", nargs="?", help="hub id, folder, .gguf file, or smollm2-135m (the starter model)"
    )
    parser.add_argument("--model", dest="model_flag", metavar="MODEL", help="the same, as a flag")


def model_of(options: argparse.Namespace) -> str:
    """The model that was named.

    Raises:
        InvalidRequestError: none, or two.
    """
    from cotrt.errors import InvalidRequestError

    if (options.model is None) == (options.model_flag is None):
        raise InvalidRequestError("name one model, as MODEL or as --model MODEL")
    model: str = options.model or options.model_flag
    return model


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """All options of `LLM` but its model."""
    group = parser.add_argument_group("engine")
    for name, (kind, text) in _FLAGS.items():
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, dest=name, type=kind, default=None, help=text, metavar="X")
    for name, text in _SWITCHES.items():
        group.add_argument(
            "--" + name.replace("_", "-"),
            dest=name,
            action=argparse.BooleanOptionalAction,
            default=None,
            help=text,
        )


def engine_options(options: argparse.Namespace, *, lenient: bool = False) -> dict[str, Any]:
    """What was given of them, for ``LLM(model, **options)``.

    Args:
        lenient: ignore, with a log line, what means nothing on a CPU, as vLLM's users expect of a
            server.
    """
    given = {name: getattr(options, name) for name in (*_FLAGS, *_SWITCHES)}
    given = {name: value for name, value in given.items() if value is not None}
    if lenient and _is_on_cpu(given.get("device", "auto")):
        for name in ("gpu_memory_utilization", "enforce_eager"):
            if given.pop(name, None) is not None:
                logger.info("--%s means nothing on a CPU and is ignored", name.replace("_", "-"))
    return given


def _is_on_cpu(device: str) -> bool:
    if device == "auto":
        import torch

        return not torch.cuda.is_available()
    return device == "cpu"
