#!/usr/bin/env bash
# The long forms of tests and checks, one a line; run it from the repository's root.
set -euo pipefail
COTRT_LONG_TESTS=1 python -m pytest -q tests/program/test_tool_calls.py
