"""The CPU benchmarks run at toy size on the starter model, and say what they measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cotrt.bench.__main__ import main
from cotrt.bench.cpu import table


def test_every_workload_runs_and_makes_its_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    assert main(["cpu", "--toy", "--reps", "1", "--json", str(out)]) == 0
    records = {r["workload"]: r for r in json.loads(out.read_text())["records"]}
    made = {name: record["out_tokens"] for name, record in records.items()}
    assert made == {"W1": 32, "W2": 32, "W3": 64, "W4": 32, "W5": 16, "W6": 18}
    assert "| cotrt |" in capsys.readouterr().out


def test_the_table_names_the_better_peer() -> None:
    def record(engine: str, seconds: float) -> dict[str, object]:
        return {
            "engine": engine,
            "workload": "W2",
            "status": "ok",
            "runs_s": [seconds],
            "median_s": seconds,
            "out_tok_s": 1.0,
        }

    text = table([record("cotrt", 2.0), record("a", 9.0), record("b", 6.0)], ["W2"])
    assert "| cotrt over the better peer | 3.00x |" in text


def test_a_step_is_broken_down(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--prefix", "40", "--branches", "1,3", "--steps", "4", "--reps", "1"]
    assert main(["step", *arguments]) == 0
    assert "step / limit" in capsys.readouterr().out


def test_the_price_of_determinism(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    arguments = ["--toy", "--reps", "1", "--only", "W1,W2", "--json", str(out)]
    assert main(["deterministic", *arguments]) == 0
    records = json.loads(out.read_text())["records"]
    assert [r["workload"] for r in records] == ["W1", "W2"]
    assert all(len(r["ratios"]) == 1 and r["ratios"][0] > 0 for r in records)
    assert "throughput kept" in capsys.readouterr().out


def test_a_busy_thread_and_a_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["busy", "--toy", "--reps", "1"]) == 0
    assert main(["start", "--reps", "1"]) == 0
    said = capsys.readouterr().out
    assert "beside a busy thread" in said and "private memory" in said
