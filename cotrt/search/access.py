"""The few things of a branch's engine that searches need and the program API does not show."""

from __future__ import annotations

from typing import Any

from cotrt.options.sampling import SamplingParams
from cotrt.program.branch import Branch


def tokenizer_of(branch: Branch) -> Any:
    """The model's tokenizer, or None."""
    return branch._runtime.tokenizer


def default_params(branch: Branch) -> SamplingParams:
    """The model's own sampling defaults."""
    return branch._runtime.defaults


def counters_of(branch: Branch) -> dict[str, int]:
    """``llm.metrics`` of the branch's LLM."""
    from cotrt.program.stats import metrics

    engine = branch._runtime.engine
    with engine.lock:
        return metrics(engine)
