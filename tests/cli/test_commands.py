"""The commands in this process, over scripted models: output, exit codes, errors in one line."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cotrt
from cotrt.cli import COMMANDS, main
from cotrt.saved.layout import SavedBranch
from cotrt.saved.reader import SavedFile
from cotrt.saved.writer import write
from cotrt.testing import ScriptedModel

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
REAL = cotrt.LLM


def echoing(ids: Sequence[int]) -> Mapping[int, float]:
    """After <assistant>: "ok" and the number of messages before, then the end."""
    said = "".join(map(chr, ids))
    start = said.rfind("<assistant>") + len("<assistant>")
    text = [*map(ord, f"ok{said.count('</s>')}"), 0]
    return {text[min(len(said) - start, len(text) - 1)]: 1.0}


def counting(ids: Sequence[int]) -> Mapping[int, float]:
    return {97 + len(ids) % 26: 1.0}


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Makes every `LLM` a scripted one."""

    def use(next_probs: Any, **more: Any) -> None:
        def make(name: str, **options: Any) -> Any:
            assert name == "a-model"
            scripted = ScriptedModel(next_probs, **{"vocab_size": 300, "eos_token_id": 0, **more})
            options = {"kv_cache_memory_bytes": 1 << 18, "chat_template": TEMPLATE, **options}
            return REAL(scripted, **options)

        monkeypatch.setattr(cotrt, "LLM", make)

    use(counting)
    return use


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    if command == "bench":
        assert main(["bench"]) == 2
        assert "cpu" in "".join(capsys.readouterr())
        assert main(["bench", "--help"]) == 0
        assert "cpu" in capsys.readouterr().out
        return
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert f"cotrt {command}" in capsys.readouterr().out.partition("example:")[2]


@pytest.mark.parametrize(
    ("argv", "code", "text"),
    [
        ([], 2, "COMMAND"),
        (["nope"], 2, "nope"),
        (["run"], 2, "--prompt"),
        (["run", "--prompt", "a"], 1, "name one model"),
        (["run", "no/such/model/here", "--prompt", "a"], 1, "does not exist"),
        (["run", "a-model", "--file", "not-there.jsonl"], 1, "not-there.jsonl"),
        (["serve", "a-model", "--api-key", "with space"], 1, "API key"),
        (["serve", "a-model", "--tool-call-parser", "x"], 1, "tool_call_parser"),
        (["serve", "a-model", "--block-size", "x"], 2, "block-size"),
        (["model", "convert", "not-there.gguf", "x"], 1, "not-there.gguf"),
        (["tree", "a-model", "--question", "q", "--n", "0"], 2, "--n: '0': must be an int of at"),
        (["tree", "a-model", "--question", "q", "--budget", "-1"], 2, "--budget: '-1': must be"),
        (["tree", "a-model", "--question", "q", "--deadline", "nan"], 2, "--deadline: 'nan': must"),
    ],
)
def test_errors_are_one_line_with_an_exit_code(
    argv: list[str], code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == code
    error = capsys.readouterr().err
    assert text in error and "Traceback" not in error


def test_run_streams_one_prompt(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "a-model", "--prompt", "abc", "--max-tokens", "5"]) == 0
    assert capsys.readouterr().out == "defgh\n"


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["run", "--prompt", "a", "--temperature", "-1"], "--temperature: must be in [0, 100]"),
        (["run", "--file", "-", "--output", "/no-dir/x"], "--output /no-dir/x: there is no folder"),
        (["tree", "--question", "a", "--html", "/no-dir/x"], "--html /no-dir/x: there is no"),
        (["tree", "--question", "a", "--html", "/"], "--html /: it is a folder"),
        (["chat", "--sampling-seed", str(2**65)], "--sampling-seed: must be in"),
    ],
)
def test_flags_are_checked_before_a_model_is_loaded(
    argv: list[str],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cotrt, "LLM", lambda *_, **__: pytest.fail("a model was loaded"))
    with pytest.raises(SystemExit) as caught:
        main([argv[0], "a-model", *argv[1:]])
    assert caught.value.code == 1
    assert text in capsys.readouterr().err


def test_run_takes_and_gives_json_lines(
    model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, sink = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines: list[Any] = [
        "abc",
        {"id": 7, "prompt": "ab", "max_tokens": 2, "n": 2},
        {"messages": [{"role": "user", "content": "x"}], "stop": "z"},
    ]
    source.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    argv = ["run", "a-model", "--file", str(source), "--output", str(sink), "--max-tokens", "4"]
    assert main(argv) == 0
    found = [json.loads(line) for line in sink.read_text().splitlines()]
    assert found[0]["outputs"] == [{"text": "defg", "finish_reason": "length"}]
    assert found[1]["id"] == 7 and [o["text"] for o in found[1]["outputs"]] == ["cd", "cd"]
    assert found[2]["usage"]["completion_tokens"] <= 4
    source.write_text('"ok"\n{"prompt": "a", "nope": 1}\n')
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 1
    assert "line 2" in capsys.readouterr().err
    source.write_text('"ok"\n{\n')
    with pytest.raises(SystemExit):
        main(argv)
    assert "in.jsonl:2" in capsys.readouterr().err


def test_chat_forks_switches_undoes_saves_and_loads(
    model: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model(echoing)
    file = tmp_path / "talk.json"
    script = [
        "hi",
        "/fork 2",
        "/switch 2",
        "more",
        "/branches",
        "/tree",
        "/undo",
        f"/save {file}",
        f"/load {file}",
        "again",
        "/switch 9",
        "/load not-there",
        "/what",
        "/quit",
    ]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(script) + "\n"))
    assert main(["chat", "a-model"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("ok1\n2 more; /switch 1")
    assert "ok3\n" in said
    assert "* 2  4 messages  ok3" in said and "\n   * 2  4 messages" in said
    assert "* 2  2 messages  ok1" in said
    assert json.loads(file.read_text())["messages"][1]["content"] == "ok1"
    assert "* 3  2 messages  ok1\nok3\n" in said
    assert "! /switch 9" in said and "! cannot load" in said and "/fork [N]" in said


def test_chat_saves_with_kv_and_loads_what_it_can(
    model: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file, other = tmp_path / "talk", tmp_path / "other"
    model(echoing)

    def talk(*lines: str) -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
        assert main(["chat", "a-model"]) == 0
        return capsys.readouterr().out

    assert talk("/nope 1").startswith("! /nope: there is no such command\n/fork [N]")
    assert talk("/help").startswith("/fork [N]")
    assert talk("hi", f"/save {file}", "more") == f"ok1\nsaved {file}\nok3\n"
    saved = SavedFile(file)
    assert saved.chunks and saved.branches[0].metadata["messages"][1]["content"] == "ok1"
    saved.close()
    assert talk(f"/load {file}", "more") == "* 1  2 messages  ok1\nok3\n"
    model(echoing, fingerprint="another")
    said = talk(f"/load {file}", "more")
    assert "saved from another model" in said
    assert "computed again\n* 1  2 messages  ok1\nok3" in said
    saved_by_a_program = [SavedBranch(*(np.zeros(0, t) for t in (np.int32, np.float64, np.uint8)))]
    write(other, saved_by_a_program, [], shape=ScriptedModel.kv_shape, fingerprint="")
    assert "it holds no conversation" in talk(f"/load {other}")
    (tmp_path / "text.json").write_text("[]")
    assert "it holds no conversation" in talk(f"/load {tmp_path / 'text.json'}")
    for text in (
        '{"messages": [{"role": "user", "content": 5}]}',
        '{"messages": [7]}',
        "[" * 99_999,
    ):
        (tmp_path / "text.json").write_text(text)
        assert talk(f"/load {tmp_path / 'text.json'}").startswith(f"! /load {tmp_path}")


def test_tree_draws_what_it_searched(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["tree", "a-model", "--question", "q", "--n", "2", "--depth", "2", "--max-tokens", "4"]
    for method in ("tree_of_thoughts", "best_of_n", "self_consistency", "step_beam_search"):
        assert main([*argv, "--method", method]) == 0
        said = capsys.readouterr().out
        assert method in said and "stopped by" in said


def test_flags_cover_every_option_of_the_engine() -> None:
    from dataclasses import fields

    from cotrt.cli.engine_flags import _FLAGS, _SWITCHES
    from cotrt.options.engine import EngineConfig

    assert {f.name for f in fields(EngineConfig)} - {"model"} == {*_FLAGS, *_SWITCHES}


def test_what_means_nothing_on_a_cpu_is_ignored_by_serve_alone() -> None:
    import argparse

    from cotrt.cli.engine_flags import add_engine_flags, engine_options

    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    argv = ["--gpu-memory-utilization", "0.5", "--enforce-eager", "--device", "cpu"]
    options = parser.parse_args(argv)
    assert engine_options(options, lenient=True) == {"device": "cpu"}
    assert engine_options(options)["gpu_memory_utilization"] == 0.5


def speaking(text: str) -> Callable[[Sequence[int]], Mapping[int, float]]:
    """Says a text after ``:``, then ends."""

    def next_probs(ids: Sequence[int]) -> Mapping[int, float]:
        said = len(ids) - 1 - max(i for i, one in enumerate(ids) if one == ord(":"))
        return {ord(text[said]) if said < len(text) else 0: 1.0}

    return next_probs


SAID = "\u00e9\u2713\u4e2d ok"  # Latin 1, a sign, a Chinese character


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [
        ("ascii", "??? ok"),
        ("cp1252", "\u00e9?? ok"),
        ("latin-1", "\u00e9?? ok"),
        ("gbk", "\u00e9?\u4e2d ok"),
        ("utf-8", SAID),
    ],
)
@pytest.mark.parametrize("command", ["run", "tree", "chat"])
def test_a_terminal_that_lacks_characters_shows_others_for_them(
    command: str, encoding: str, shown: str, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model(speaking(SAID), vocab_size=1 << 15)
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stdin", io.StringIO("go:\n"))
    common = ["a-model", "--temperature", "0", "--max-tokens", "20"]
    argv = {
        "run": ["run", *common, "--prompt", "go:"],
        "tree": ["tree", *common, "--question", "go:", "--method", "best_of_n", "--n", "1"],
        "chat": ["chat", *common],
    }
    monkeypatch.setattr(
        f"{__name__}.TEMPLATE", "{% for m in messages %}{{ m.content }}{% endfor %}:"
    )
    assert main(argv[command]) == 0
    out.flush()
    assert shown in out.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
def test_json_lines_keep_every_character_in_any_encoding(
    encoding: str, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model(speaking(SAID), vocab_size=1 << 15)
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr("sys.stdout", out)
    (tmp_path / "prompts.jsonl").write_text('"go:"\n')
    argv = ["run", "a-model", "--file", str(tmp_path / "prompts.jsonl"), "--max-tokens", "20"]
    assert main(argv) == 0
    out.flush()
    reply = json.loads(out.buffer.getvalue().decode(encoding))  # type: ignore[attr-defined]
    assert reply["outputs"][0]["text"] == SAID
