"""The command line: one file a command, imported when it is called."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

from cotrt import __version__

# Each command is a module of this package with HELP, EXAMPLE, add_arguments and run.
COMMANDS = ("doctor",)


def main(argv: Sequence[str]) -> int:
    """Run a command.

    Returns:
        The process's exit code: 0, 1 where the command failed, 2 for wrong arguments, 130 after
        Ctrl-C.
    """
    parser = argparse.ArgumentParser(
        prog="cotrt", description="A chain-of-thought runtime with an embedded paged-KV engine."
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
        )
        module.add_arguments(command)
    options = parser.parse_args(argv)
    from cotrt.errors import CotrtError

    try:
        code: int = modules[options.command].run(options)
    except CotrtError as error:
        parser.exit(1, f"cotrt {options.command}: {error}\n")
    except KeyboardInterrupt:
        return 130
    return code
