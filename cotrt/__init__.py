r"""cotrt: a chain-of-thought runtime with an embedded paged-KV engine.

    from cotrt import LLM

    with LLM("smollm2-135m") as llm:
        root = llm.branch("Question: what is 7 times 8?\nLet's think step by step.\n")
        with root.fork(4) as branches:              # nothing is copied, nothing computed again
            branches.generate(max_tokens=64, temperature=0.8).result()
            scores = branches.score(" Yes", given="\nIs this right?").result()

Public names are imported when they are first used, so ``import cotrt`` is quick and loads no
torch. Messages go to ``logging.getLogger("cotrt")``, whose warnings Python shows on stderr where
the program sets no handler; nothing is printed to stdout.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cotrt.client.client import Client
    from cotrt.errors import (
        BranchBusyError,
        BranchPrunedError,
        CotrtError,
        EngineDeadError,
        InvalidRequestError,
        KVCacheExhaustedError,
        ModelLoadError,
        NumericsError,
        PromptTooLongError,
        SavedBranchError,
    )
    from cotrt.options.sampling import BeamSearchParams, SamplingParams, StructuredOutputs
    from cotrt.outputs import (
        BeamSearchOutput,
        BeamSequence,
        BranchKV,
        Choice,
        Chunk,
        CompletionOutput,
        MemoryStats,
        RequestMetrics,
        RequestOutput,
        Score,
    )
    from cotrt.program.branch import Branch
    from cotrt.program.branches import Branches
    from cotrt.program.chat import Chat
    from cotrt.program.handle import Generation, Generations, Handle
    from cotrt.program.llm import LLM
    from cotrt.sampling.logprobs import Logprob
    from cotrt.search.run import run

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSequence",
    "Branch",
    "BranchBusyError",
    "BranchKV",
    "BranchPrunedError",
    "Branches",
    "Chat",
    "Choice",
    "Chunk",
    "Client",
    "CompletionOutput",
    "CotrtError",
    "EngineDeadError",
    "Generation",
    "Generations",
    "Handle",
    "InvalidRequestError",
    "KVCacheExhaustedError",
    "Logprob",
    "MemoryStats",
    "ModelLoadError",
    "NumericsError",
    "PromptTooLongError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "SavedBranchError",
    "Score",
    "StructuredOutputs",
    "__version__",
    "run",
]

# Where each public name lives. The imports above say the same to type checkers.
_HOMES = {
    "cotrt.program.branch": ("Branch",),
    "cotrt.program.branches": ("Branches",),
    "cotrt.program.chat": ("Chat",),
    "cotrt.client.client": ("Client",),
    "cotrt.errors": (
        "BranchBusyError",
        "BranchPrunedError",
        "CotrtError",
        "EngineDeadError",
        "InvalidRequestError",
        "KVCacheExhaustedError",
        "ModelLoadError",
        "NumericsError",
        "PromptTooLongError",
        "SavedBranchError",
    ),
    "cotrt.program.handle": ("Generation", "Generations", "Handle"),
    "cotrt.program.llm": ("LLM",),
    "cotrt.outputs": (
        "BeamSearchOutput",
        "BeamSequence",
        "BranchKV",
        "Choice",
        "Chunk",
        "CompletionOutput",
        "MemoryStats",
        "RequestMetrics",
        "RequestOutput",
        "Score",
    ),
    "cotrt.options.sampling": ("BeamSearchParams", "SamplingParams", "StructuredOutputs"),
    "cotrt.sampling.logprobs": ("Logprob",),
    "cotrt.search.run": ("run",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

# Subpackages that are reached as attributes, so that `import cotrt` is enough.
_SUBMODULES = frozenset({"search", "testing", "viewer"})


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"cotrt.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'cotrt' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value  # the next look-up does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_SUBMODULES})
