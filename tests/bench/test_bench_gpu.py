"""The GPU benchmark runs at toy size without a GPU, in the interpreter, so that it cannot rot."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cotrt.bench import gpu
from cotrt.bench.__main__ import main

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests/models"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpu"]) == 2
    said = capsys.readouterr()
    assert "no CUDA device" in said.err and "--toy" in said.err and not said.out


def test_every_section_runs_at_toy_size(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        pytest.skip("triton is not installed: the extra dev brings it")
    from checkpoints import make_model, save

    folder = save(make_model("llama", head_dim=64, num_hidden_layers=1), tmp_path / "model")
    out = tmp_path / "out.json"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "cotrt.bench", "gpu", "--toy", "--model", str(folder)]
    run = subprocess.run(
        [*command, "--seconds", "2000", "--reps", "1", "--json", str(out)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    print(run.stdout[-5000:], run.stderr[-3000:])
    assert run.returncode == 0
    sections = json.loads(out.read_text())["sections"]
    assert list(sections) == list(gpu.SECTIONS)
    assert {s["status"] for s in sections.values()} == {"ok"}
    records = {name: section["records"] for name, section in sections.items()}
    assert records["tests"][0]["passed"] > 0 and records["tests"][0]["failed"] == 0
    assert len(records["attention"]) == 4
    for record in records["attention"]:
        assert record["max_error"] < 1e-5 and isinstance(record["sdpa_us"], float)
    assert [r["batch"] for r in records["decode"]] == [1, 2, 2]
    assert {r["workload"] for r in records["workloads"]} == {"W2", "W5"}
    assert any(r["engine"].startswith("transformers ") for r in records["peers"])
    for name in sections:
        assert f"## {name}: ok" in run.stdout


def test_a_section_is_cut_when_its_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(gpu.time, "monotonic", lambda: now[0])

    def records(_: float):
        for i in range(9):
            now[0] += 4
            yield {"i": i}

    section = gpu._section(records, 10.0, 1000.0)
    assert section["status"] == "cut" and len(section["records"]) == 3
    assert gpu._section(records, 10.0, now[0])["status"] == "skipped"

    def fails(_: float):
        yield {"i": 0}
        raise RuntimeError("out of memory")

    section = gpu._section(fails, 10.0, 1000.0)
    assert section["status"] == "failed" and "out of memory" in section["reason"]
    report = {"device": "d", "torch": "t", "cotrt": "c", "sections": {"bandwidth": section}}
    assert "## bandwidth: failed (RuntimeError: out of memory)" in gpu.table(report)
