"""`python -m cotrt.bench tree`: it runs, and says what it has measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cotrt.bench import tree
from cotrt.bench.__main__ import main


def test_operations_at_two_sizes() -> None:
    for context, others in ((100, 2), (3000, 50)):
        row = tree.measure_operations(context, others, repetitions=5)
        assert min(row["fork_us"], row["append_us"], row["prune_us"]) > 0


def test_a_decode_step_of_a_small_tree() -> None:
    row = tree.measure_decode(9, 20)
    assert 0 < row["median_ms"] <= row["worst_ms"]


def test_the_fork_call() -> None:
    assert tree.measure_fork_call(repetitions=20) > 0


def test_the_report_is_printed_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        tree,
        "measure_operations",
        lambda context, others: {
            "context": context,
            "others": others,
            "fork_us": 1.0,
            "append_us": 1.0,
            "prune_us": 1.0,
        },
    )
    record = tmp_path / "figures.json"
    arguments = ["tree", "--branches", "4", "--steps", "10", "--reps", "1", "--json", str(record)]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "| 100,000 | 10,000 | 1.0 | 1.0 | 1.0 |" in out
    assert json.loads(record.read_text())["decode"][0]["branches"] == 4


def test_an_unknown_benchmark_is_answered_with_the_list(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["treee"]) == 2
    assert "tree" in capsys.readouterr().err
    assert main(["--help"]) == 0
    assert "usage" in capsys.readouterr().out
