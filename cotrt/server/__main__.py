"""`python -m cotrt.server --model MODEL ...`: the same as `cotrt serve MODEL ...`."""

from __future__ import annotations

import sys

from cotrt.cli import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
