#!/usr/bin/env bash
# The long forms of random tests, one a line.
set -euo pipefail
cd "$(dirname "$0")/.."

COTRT_RANDOM_CASES=2000 python -m pytest -q tests/program/test_texts_agree.py tests/program/test_chat_reading.py
COTRT_LONG_TESTS=1 python -m pytest -q tests/program/test_tool_calls.py
