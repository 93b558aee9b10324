"""The benchmark of tiers, at a size that shows it works and no more."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "models"))
from checkpoints import make_model, save

from cotrt.bench.tiers import main


@pytest.mark.slow
def test_a_small_run_reports_both_kinds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save(make_model("llama", std=0.12), tmp_path / "model")
    out = tmp_path / "figures.json"
    arguments = ["--model", str(folder), "--chats", "8", "--context", "64", "--turns", "2"]
    arguments += ["--reply", "6", "--reps", "1", "--disk-dir", str(tmp_path), "--json", str(out)]
    code = main([*arguments, "--dtype", "float32", "--deterministic"])
    report = json.loads(out.read_text())
    assert code == 0 and report["texts_equal"] and len(report["ratios"]) == 1
    (bare,), (disk,) = report["runs"]["recompute"], report["runs"]["disk"]
    assert bare["recomputed_tokens"] > 0 and bare["loaded_tokens"] == 0
    assert disk["stored_blocks"] > 0 and disk["failed_loads"] == 0
    assert "disk / recompute" in capsys.readouterr().out
