"""The command line: one file a command, imported when it is called."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence

from cotrt import __version__

# Each command is a module of this package with HELP, EXAMPLE, add_arguments and run.
COMMANDS = ("serve", "chat", "run", "tree", "model", "bench", "doctor")


def main(argv: Sequence[str]) -> int:
    """Run a command.

    Returns:
        The process's exit code: 0, 1 where the command failed, 2 for wrong arguments, 130 after
        Ctrl-C.
    """
    _show_what_can_be_shown()
    parser = argparse.ArgumentParser(
        prog="cotrt",
        description="A chain-of-thought runtime with an embedded paged-KV engine.",
        epilog="`cotrt COMMAND --help` says more, with an example.",
    )
    parser.add_argument("--version", action="version", version=f"cotrt {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    modules = {}
    for name in COMMANDS:
        module = importlib.import_module(f"cotrt.cli.{name}")
        modules[name] = module
        command = commands.add_parser(
            name,
            help=module.HELP,
            description=module.HELP,
            epilog=f"example: {module.EXAMPLE}",
            # The benchmarks have options, and a --help, of their own.
            add_help=name != "bench",
        )
        module.add_arguments(command)
    if list(argv[:1]) == ["bench"]:  # all that follows is the benchmark's own, --help too
        options = argparse.Namespace(command="bench", arguments=list(argv[1:]))
    else:
        options = parser.parse_args(argv)
    from cotrt.errors import CotrtError

    try:
        code: int = modules[options.command].run(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has enough; Python would complain once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (CotrtError, OSError) as error:
        parser.exit(1, f"cotrt {options.command}: {error}\n")
    except ValueError as error:
        if type(error).__module__.partition(".")[0] not in ("pydantic", "pydantic_core"):
            raise
        parser.exit(1, f"cotrt {options.command}: {_first_problem(error)}\n")
    except ModuleNotFoundError as error:
        extra = getattr(modules[options.command], "NEEDS", None)
        if extra is None or (error.name or "").startswith("cotrt"):
            raise
        parser.exit(
            1,
            f"cotrt {options.command}: {error.name} is not installed: pip install "
            f"'cotrt[{extra}]'\n",
        )
    return code


def _show_what_can_be_shown() -> None:
    """A terminal that lacks a character shows ``?`` for it: models write any."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def _first_problem(error: ValueError) -> str:
    from pydantic import ValidationError

    from cotrt.options.sampling import first_problem

    assert isinstance(error, ValidationError)
    return ": ".join(first_problem(error))


def entry() -> None:
    """The console script."""
    sys.exit(main(sys.argv[1:]))
