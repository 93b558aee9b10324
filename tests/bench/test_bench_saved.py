"""The bench of saved branches runs, at toy size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cotrt.bench.__main__ import main


def test_loading_against_computing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    argv = ["saved", "--tokens", "600", "--layers", "1", "--hidden", "144", "--vocab", "400"]
    assert main([*argv, "--reps", "1", "--json", str(out)]) == 0
    said = capsys.readouterr().out
    assert "A branch of 600 tokens" in said and "times as fast as computing" in said
    report = json.loads(out.read_text())
    assert report["file_bytes"] > 600 * 2 * 3 * 16 * 2
    assert len(report["loaded_s"]) == 1 and report["ratio"] > 0
