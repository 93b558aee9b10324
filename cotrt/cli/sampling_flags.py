"""Flags that say how to sample, for the commands that generate."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cotrt import LLM, SamplingParams

_FLAGS: dict[str, tuple[type, str]] = {
    "max_tokens": (int, "tokens to generate at most"),
    "temperature": (float, "0 is greedy"),
    "top_p": (float, "the likeliest tokens up to this mass"),
    "top_k": (int, "the k likeliest tokens"),
    "min_p": (float, "tokens at least this likely, relative to the likeliest"),
    "repetition_penalty": (float, "above 1 repeats less"),
    "sampling_seed": (int, "same seed, same text"),
}


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    for name, (kind, text) in _FLAGS.items():
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, dest=f"sampling_{name}", type=kind, help=text, metavar="X")
    group.add_argument("--stop", dest="sampling_stop", action="append", help="ends the text")


def check_sampling(options: argparse.Namespace) -> None:
    """Refuse what no model could take, before one is loaded.

    Raises:
        InvalidRequestError: names the flag.
    """
    from pydantic import ValidationError

    from cotrt.errors import InvalidRequestError
    from cotrt.options.sampling import SamplingParams, first_problem

    try:
        SamplingParams(**_given(options))
    except ValidationError as error:
        where, text = first_problem(error)
        name = where.partition(".")[0]
        flag = "sampling-seed" if name == "seed" else name.replace("_", "-")
        raise InvalidRequestError(f"--{flag}: {text}") from None


def sampling_params(options: argparse.Namespace, llm: LLM) -> SamplingParams:
    """The model's defaults with what was given on top."""
    return llm._runtime.params(None, _given(options))


def _given(options: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(options, f"sampling_{name}") for name in (*_FLAGS, "stop")}
    return {
        "seed" if name == "sampling_seed" else name: value
        for name, value in given.items()
        if value is not None
    }
