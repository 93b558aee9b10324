"""Models by hub id: found in the cache, or refused with what to do. No network here."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoints import make_model, save
from tokens import byte_tokenizer

from cotrt.errors import InvalidRequestError, ModelLoadError
from cotrt.models import hub, load

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from huggingface_hub import constants

    folder = tmp_path / "hub"
    folder.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return folder


@pytest.fixture
def cached(cache: Path) -> Path:
    """A model as huggingface_hub keeps it: links into a folder of blobs."""
    root = cache / "models--someone--tiny"
    blobs, snapshot = root / "blobs", root / "snapshots" / COMMIT
    save(make_model("llama"), blobs)
    byte_tokenizer(blobs)
    snapshot.mkdir(parents=True)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(path)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(COMMIT)
    return snapshot


def test_a_cached_model_loads_offline(cached: Path) -> None:
    loaded = load("someone/tiny")
    assert loaded.name == "someone/tiny"
    assert loaded.folder == cached
    assert loaded.tokenizer is not None
    assert load("someone/tiny", revision=COMMIT).fingerprint == loaded.fingerprint


def test_a_tokenizer_of_a_cached_model_is_found(cached: Path, tmp_path: Path) -> None:
    folder = save(make_model("llama"), tmp_path / "bare")
    assert load(folder, tokenizer="someone/tiny").tokenizer is not None


def test_an_uncached_model_offline_says_to_go_online(cache: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"someone/else is not in the hub's cache.*Go online"):
        load("someone/else")


@pytest.mark.parametrize("gone", ["config.json", "model.safetensors"])
def test_a_half_downloaded_model_says_how_to_end_it(gone: str, cached: Path) -> None:
    (cached / gone).unlink()
    with pytest.raises(ModelLoadError, match="hf download someone/tiny"):
        load("someone/tiny")


def test_a_link_to_a_blob_that_is_not_there_is_named(cached: Path) -> None:
    (cached / "model.safetensors").resolve().unlink()
    with pytest.raises(ModelLoadError, match=r"lacks model\.safetensors.*half-downloaded"):
        load("someone/tiny")


def failing(error: Exception) -> Any:
    def download(*_: object, **__: object) -> str:
        raise error

    return download


def response(status: int) -> Any:
    """Stands for whatever HTTP library huggingface_hub uses."""
    return SimpleNamespace(status_code=status, headers={}, request=None)


def hub_errors() -> list[Any]:
    from huggingface_hub import errors

    return [
        (errors.GatedRepoError("no", response=response(403)), "gated: accept its terms.*hf auth"),
        (errors.RevisionNotFoundError("no", response=response(404)), "has no revision 'v9'"),
        (errors.RepositoryNotFoundError("no", response=response(404)), "Check the spelling"),
        (errors.LocalEntryNotFoundError("no"), "Go online once"),
        (errors.OfflineModeIsEnabled("no"), "Go online once"),
        (ConnectionError("cable cut"), "cable cut.*what has come is kept"),
    ]


@pytest.mark.parametrize(("error", "word"), hub_errors(), ids=lambda v: type(v).__name__)
def test_every_failure_of_the_hub_is_an_error_with_its_remedy(
    error: Exception, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", failing(error))
    with pytest.raises(ModelLoadError, match=word):
        load("someone/tiny", revision="v9")


def test_neither_code_nor_pickled_weights_are_fetched(
    cached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    asked: dict[str, Any] = {}

    def download(repository: str, **settings: Any) -> str:
        asked.update(settings)
        return str(cached)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    load("someone/tiny")
    files = [
        "config.json",
        "model-00001-of-00002.safetensors",
        "tokenizer.json",
        "tokenizer.model",
        "merges.txt",
        "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja",
        "modeling_x.py",
        "pytorch_model.bin",
        "consolidated.safetensors",
        "original/consolidated.00.pth",
        "onnx/model.onnx",
    ]
    kept = filter_repo_objects(
        files, allow_patterns=asked["allow_patterns"], ignore_patterns=asked["ignore_patterns"]
    )
    assert list(kept) == files[:7]


@pytest.mark.parametrize("name", ["./missing", "a/b/c", "/no/such/folder", "x.gguf", "a b", ""])
def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub(name: str) -> None:
    with pytest.raises(ModelLoadError, match="does not exist"):
        hub.find(name)


def test_arguments_of_another_kind_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="got int"):
        load(7)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="revision= is for hub ids"):
        load("smollm2-135m", revision="main")
    with pytest.raises(InvalidRequestError, match="a local folder or file has no revisions"):
        load(tmp_path, revision="nonsense")


def test_a_tokenizer_that_is_not_there_is_called_one() -> None:
    with pytest.raises(ModelLoadError, match="tokenizer '/no/such/folder' does not exist"):
        hub.find("/no/such/folder", weights=False)


def test_a_near_miss_of_the_starters_name_hints_at_it(cache: Path) -> None:
    for name in ("smollm2-135M", "SmolLM2-135M-Instruct", "smollm2"):
        with pytest.raises(ModelLoadError, match="The starter model's name is 'smollm2-135m'"):
            hub.find(name)
    with pytest.raises(ModelLoadError) as caught:
        hub.find("gpt2")
    assert "starter" not in str(caught.value)


def test_a_folder_with_a_home_sign_is_expanded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(make_model("llama"), tmp_path / "m")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load("~/m").folder == tmp_path / "m"
    shutil.rmtree(tmp_path / "m")
