"""``python -m cotrt.bench NAME``: one benchmark a module, each with its own options."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence

# name -> (module of this package, what it measures)
BENCHMARKS = {
    "tree": ("tree", "fork, prune, append, and a step's own cost, without a model"),
    "saved": ("saved", "loading a long saved branch beside computing it"),
    "cpu": ("cpu", "the workloads on the CPU, beside peers where they are installed"),
    "busy": ("busy", "a workload beside a busy Python thread"),
    "start": ("startup", "seconds to a model and to a first token, and memory"),
    "step": ("breakdown", "where a decode step's time goes, beside the memory limit"),
    "attention": ("attention", "grouped attention against plain, with intervals"),
    "deterministic": ("deterministic", "what deterministic=True costs, beside the default"),
    "tiers": ("tiers", "a disk tier against computing again, under memory pressure"),
    "gpu": ("gpu", "the workloads and kernels on a GPU"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark that the first argument names.

    Returns:
        Its exit code; 2 for an unknown name.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    built = {
        name: entry
        for name, entry in BENCHMARKS.items()
        if importlib.util.find_spec(f"cotrt.bench.{entry[0]}") is not None
    }
    if arguments and arguments[0] in built:
        module = importlib.import_module(f"cotrt.bench.{built[arguments[0]][0]}")
        return int(module.main(arguments[1:]))
    asked = bool(arguments) and arguments[0] in ("-h", "--help")
    lines = ["usage: python -m cotrt.bench NAME [options]   (NAME --help lists them)", ""]
    lines += [f"  {name:<13} {what}" for name, (_, what) in built.items()]
    print("\n".join(lines), file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


if __name__ == "__main__":
    sys.exit(main())
