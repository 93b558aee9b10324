"""The CPU benchmarks run at toy size on the starter model, and say what they measured."""

from __future__ import annotations

import json
import sys
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
    assert made == {"W1": 32, "W2": 32, "W3": 64, "W4": 32, "W5": 16, "W6": 18, "P1": 40, "P2": 48}
    assert "| cotrt |" in capsys.readouterr().out


COMMON = """
import json, os
THREADS = int(os.environ["BENCH_THREADS"])
def toks(key, n): return [hash(key) % 1000] * n
def one(engine, w, rep, warm): return engine.w5(w)
def run_all(engine):
    records = []
    for w in os.environ["BENCH_ONLY"].split(","):
        seconds, made, _, _ = one(engine, w, 0, False)
        records.append(dict(engine="other", workload=w, status="ok", runs_s=[seconds],
                            median_s=seconds, out_tok_s=made / seconds, calls=engine.calls))
    with open(os.environ["BENCH_OUT"], "w") as f:
        json.dump(records, f)
"""
SCRIPT = """
import common as c
class Other:
    calls = []
    def reset(self): pass
    def w1(self, prompts, out): self.calls.append([len(prompts), len(prompts[0]), out])
    def w5(self, w): self.calls.append(w); return 1.0, 7, 0, {}
if __name__ == "__main__":
    c.run_all(Other())
"""


def test_a_peer_runs_by_its_own_script_and_gets_the_same_prompts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "common.py").write_text(COMMON)
    (tmp_path / "bench_other.py").write_text(SCRIPT)
    out = tmp_path / "out.json"
    peer = ["--scripts", str(tmp_path), "--peer", f"other={sys.executable}"]
    arguments = ["--toy", "--reps", "1", "--only", "W5,P1,P2", *peer, "--json", str(out)]
    assert main(["cpu", *arguments]) == 0
    theirs = [r for r in json.loads(out.read_text())["records"] if r["engine"] == "other"]
    assert [r["workload"] for r in theirs] == ["W5", "P1", "P2"]
    assert theirs[-1]["calls"] == ["W5", [1, 40, 1], [3, 16, 1]]
    assert "| cotrt over the better peer |" in capfd.readouterr().out


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
