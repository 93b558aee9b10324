"""`import cotrt` is quick, loads nothing heavy, and prints nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

# Seconds of processor time: other work on the machine does not count.
_PROBE = """
import json, sys, time
before = set(sys.modules)
start = time.process_time()
import cotrt
seconds = time.process_time() - start
print(json.dumps({"seconds": seconds, "modules": sorted(set(sys.modules) - before)}))
"""

_HEAVY = {
    "anyio",
    "huggingface_hub",
    "numpy",
    "pydantic",
    "safetensors",
    "tokenizers",
    "torch",
    "transformers",
}


def _run(code: str, repository: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=repository,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout


def test_import_takes_under_300_ms_and_loads_nothing_heavy(repository: Path) -> None:
    probes = [json.loads(_run(_PROBE, repository)) for _ in range(3)]
    assert not _HEAVY & set(probes[0]["modules"])
    assert min(probe["seconds"] for probe in probes) < 0.3


def test_params_and_errors_load_no_torch(repository: Path) -> None:
    code = (
        "import sys, cotrt; cotrt.SamplingParams(); cotrt.CotrtError; print('torch' in sys.modules)"
    )
    assert _run(code, repository) == "False\n"


def test_policy_rooms_load_no_torch(repository: Path) -> None:
    code = (
        "import sys, pkgutil, importlib, cotrt.plan, cotrt.options.engine, cotrt.tree\n"
        "import cotrt.options.pool_size\n"
        "for found in pkgutil.walk_packages(cotrt.tree.__path__, 'cotrt.tree.'):\n"
        "    importlib.import_module(found.name)\n"
        "print('torch' in sys.modules)"
    )
    assert _run(code, repository) == "False\n"


def test_warnings_are_seen_on_stderr_and_no_more_until_the_user_asks(repository: Path) -> None:
    code = (
        "import cotrt, logging\n"
        "logger = logging.getLogger('cotrt.engine')\n"
        "logger.info('not shown')\n"
        "logger.warning('shown')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=repository, capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("", "shown\n")
