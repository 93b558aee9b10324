"""`cotrt bench`: the benchmarks of `cotrt.bench`."""

from __future__ import annotations

import argparse

HELP = "run a benchmark; `cotrt bench` alone lists them"
EXAMPLE = "cotrt bench cpu --help"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> int:
    """Hand over to the benchmark.

    Returns:
        Its exit code.
    """
    from cotrt.bench.__main__ import main

    return main(options.arguments)
