"""`cotrt doctor`: what this machine runs cotrt on, in one screen."""

from __future__ import annotations

import argparse
import os
import platform
from importlib import metadata

HELP = "show device, kernels, memory and versions, and generate ten tokens"
EXAMPLE = "cotrt doctor --model smollm2-135m"

_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "pydantic", "triton")
_GIB = 1 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", help="generate ten tokens with it; default: the starter model if it is here"
    )


def run(options: argparse.Namespace) -> int:
    """Print the report.

    Returns:
        1 if the self-test failed.
    """
    import torch

    from cotrt import __version__
    from cotrt.kernels import dispatch
    from cotrt.options.host_memory import available_bytes

    device = "cuda" if torch.cuda.is_available() else "cpu"
    available = available_bytes()
    memory = "unknown" if available is None else f"{available / _GIB:.1f} GiB available"
    pool = min(4 * _GIB, (available or 10 * _GIB) * 2 // 5) / _GIB
    _line("cotrt", __version__)
    _line("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    _line("packages", ", ".join(f"{name} {_version(name)}" for name in _PACKAGES))
    _line("device", torch.cuda.get_device_name() if device == "cuda" else "cpu")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    _line("cores", f"{cores} usable")
    _line("memory", f"{memory}; KV pool by default {pool:.1f} GiB")
    for dtype in (torch.bfloat16, torch.float32):
        backend = dispatch.choose(device, dtype, 64, 16)
        isa = f" [{_isa()}]" if backend.name == "cpu" else ""
        name = str(dtype).removeprefix("torch.")
        _line(f"kernels {name}", f"{backend.name}{isa}: {backend.why}")
    if backend.name == "cpu" and (warning := _isa_warning()):
        _line("", f"warning: {warning}")
    return _self_test(options.model)


def _self_test(model: str | None) -> int:
    from cotrt import LLM, SamplingParams
    from cotrt.errors import CotrtError

    if model is None:
        from cotrt.models.starter import is_ready

        if not is_ready():
            _line("self-test", "skipped: the starter model is not here; name one with --model")
            return 0
        model = "smollm2-135m"
    try:
        with LLM(model) as llm:
            params = SamplingParams(temperature=0, max_tokens=10)
            output = llm.generate("The capital of France is", params, use_tqdm=False)[0]
            _line("self-test", f"{model} on {llm.kernels}: {output.outputs[0].text!r}")
    except CotrtError as error:
        _line("self-test", f"FAILED: {error}")
        return 1
    return 0


def _isa() -> str:
    from cotrt.kernels.cpu.native import isa

    return isa()


def _isa_warning() -> str | None:
    from cotrt.kernels.cpu.native import isa_warning

    return isa_warning()


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _line(name: str, text: str) -> None:
    print(f"{name:<16} {text}")
