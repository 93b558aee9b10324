"""Finds a model by what a user typed: a folder, a .gguf file, a hub id, or the starter's name."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from ..errors import InvalidRequestError, ModelLoadError
from . import starter

# What is fetched: never code, never pickled weights, nothing in sub-folders but chat templates.
_WANTED = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
_UNWANTED = ["consolidated*", "original/*", "onnx/*", "*.py", "*.bin", "*.pth", "*.h5", "*.msgpack"]
_TOKENIZER_ONLY = [pattern for pattern in _WANTED if pattern != "*.safetensors"]
_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


@dataclass(frozen=True)
class Found:
    """Where a model lies.

    Attributes:
        name: what the user called it.
        folder: of its files.
        gguf: the .gguf file, where it is one.
    """

    name: str
    folder: Path
    gguf: Path | None = None


def find(
    model: str | os.PathLike[str],
    *,
    revision: str | None = None,
    progress: bool | None = None,
    weights: bool = True,
) -> Found:
    """Find a model, fetching it if need be.

    Args:
        model: a folder, a .gguf file, a hub id (``owner/name``) or ``"smollm2-135m"``.
        revision: branch, tag or commit of a hub id.
        progress: show download bars; None: if stderr is a terminal.
        weights: False: its tokenizer only.

    Raises:
        ModelLoadError: it is not there, cannot be fetched, or is half there; says what to do.
        InvalidRequestError: a revision of something that has none.
    """
    if not isinstance(model, (str, os.PathLike)):
        raise InvalidRequestError(
            f"model must be a folder, a .gguf file, a hub id or 'smollm2-135m', got "
            f"{type(model).__name__}."
        )
    name = os.fspath(model)
    if name == starter.NAME:
        if revision is not None:
            raise InvalidRequestError("revision= is for hub ids; the starter model has one only.")
        return Found(name, starter.ensure(progress))
    path = Path(name).expanduser()
    if revision is not None and name and path.exists():
        raise InvalidRequestError(
            f"revision={revision!r} with {name!r}, which is here already: a local folder or file "
            "has no revisions; leave it out, or name a hub id"
        )
    if name and path.is_dir():
        return Found(name, path)
    if path.is_file():
        if path.suffix.lower() == ".gguf":
            return Found(name, path.parent, path)
        raise ModelLoadError(
            f"{name} is a file but no .gguf; give the folder that holds the model's config.json."
        )
    if isinstance(model, os.PathLike) or not _ID.fullmatch(name) or name.endswith(".gguf"):
        if not weights:
            raise ModelLoadError(
                f"tokenizer {name!r} does not exist: give a folder that has a tokenizer.json, or a "
                "hub id (owner/name); leave it out to use the model's own."
            )
        raise ModelLoadError(
            f"model {name!r} does not exist: give a folder of safetensors with its config.json, a "
            ".gguf file, a hub id (owner/name), or 'smollm2-135m' for the starter model."
        )
    try:
        return Found(name, _fetch(name, revision, progress, weights))
    except ModelLoadError as error:
        if not re.fullmatch(r"smol-?lm-?2?(-135m)?(-instruct)?", name, re.IGNORECASE):
            raise
        raise ModelLoadError(f"{error} The starter model's name is {starter.NAME!r}.") from error


def _fetch(repository: str, revision: str | None, progress: bool | None, weights: bool) -> Path:
    import sys

    import huggingface_hub
    from huggingface_hub import errors
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    show = sys.stderr.isatty() if progress is None else progress
    hide = not show and not are_progress_bars_disabled()
    if hide:
        disable_progress_bars()
    try:
        folder = huggingface_hub.snapshot_download(
            repository,
            revision=revision,
            allow_patterns=_WANTED if weights else _TOKENIZER_ONLY,
            ignore_patterns=_UNWANTED,
        )
    except errors.GatedRepoError as error:
        raise ModelLoadError(
            f"{repository} is gated: accept its terms on its page of the hub, then log in with "
            "`hf auth login` (or set HF_TOKEN) and run this again."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelLoadError(
            f"{repository} has no revision {revision!r}; leave revision= out for the newest."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelLoadError(
            f"{repository} is neither a folder here nor a model on the hub (or it is private: "
            "`hf auth login`). Check the spelling: owner/name."
        ) from error
    except errors.HFValidationError as error:
        raise ModelLoadError(f"{repository} is no folder here and no hub id: {error}") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise ModelLoadError(
            f"{repository} is not in the hub's cache ({_cache()}) and the hub cannot be reached "
            "(offline, or HF_HUB_OFFLINE is set). Go online once and run this again, or give a "
            "model folder."
        ) from error
    except Exception as error:
        raise ModelLoadError(
            f"{repository} could not be fetched from the hub: {error}. Run this again: what has "
            "come is kept."
        ) from error
    finally:
        if hide:
            enable_progress_bars()
    found = Path(folder)
    if weights:
        _check_whole(found, repository)
    return found


def _check_whole(folder: Path, repository: str) -> None:
    """Offline, the hub's cache gives a snapshot as it is, whole or not."""
    again = f"it is half-downloaded: go online and run `hf download {repository}`."
    if not (folder / "config.json").exists():
        if any(folder.glob("*.gguf")):
            return
        raise ModelLoadError(
            f"{repository} has no config.json in {folder}: either it is no transformers model, or "
            + again
        )
    broken = sorted(p.name for p in folder.iterdir() if p.is_symlink() and not p.exists())
    if broken:
        raise ModelLoadError(f"{repository} lacks {', '.join(broken)} in {folder}: {again}")
    index = folder / "model.safetensors.index.json"
    if not index.exists() and not any(folder.glob("*.safetensors")):
        raise ModelLoadError(
            f"{repository} has no safetensors in {folder}: either the model has pickled weights or "
            f".gguf files only (convert it, or give a .gguf's path), or {again}"
        )


def _cache() -> str:
    from huggingface_hub import constants

    return str(constants.HF_HUB_CACHE)
