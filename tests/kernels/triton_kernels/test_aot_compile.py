"""The script that compiles the kernels ahead of time: some variants, and what it refuses."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def load_script():
    spec = importlib.util.spec_from_file_location("aot_compile", ROOT / "scripts/aot_compile.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["aot_compile"] = module
    spec.loader.exec_module(module)
    return module


def test_a_handful_of_variants_compiles_without_spills():
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        pytest.skip("triton is not installed: the extra dev brings it")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "scripts/aot_compile.py", "--quick", "--workers", "1"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    print(run.stdout[-4000:], run.stderr[-2000:])
    assert run.returncode == 0 and " 0 failed" in run.stdout
    for tile in (16, 32, 64, 128):
        assert f"attend bf16 d128 g4 b16 m16/{tile} " in run.stdout
    for name in (
        "attend_chunks bf16 d128 g4 b16 m32/32 ",
        "merge_chunks bf16 d128",
        "linear bf16 ",
    ):
        assert name in run.stdout


def test_spills_shared_memory_and_errors_are_failures():
    result = load_script().Result
    assert result(64, 0, 163 * 1024).failure(80) == ""
    assert "stack frame of 8 bytes" in result(64, 8, 0).failure(90)
    assert "163" not in result(64, 0, 200 * 1024).failure(90)
    assert "shared memory" in result(64, 0, 200 * 1024).failure(80)
    assert result(0, 0, 0, "CompilationError: no").failure(80) == "CompilationError: no"


def test_the_table_of_the_docs_has_every_variant():
    script = load_script()
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        pytest.skip("triton is not installed: the extra dev brings it")
    page = (ROOT / "docs/kernels-triton.md").read_text()
    table = page.split(script.BEGIN)[1].split(script.END)[0]
    listed = [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines() if line]
    missing = {job.name for job in script.all_jobs(False)} - set(listed)
    assert not missing, f"run scripts/aot_compile.py --write docs/kernels-triton.md: {missing}"
