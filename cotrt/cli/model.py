"""`cotrt model`: fetch a model, say where it is, list what is here, convert."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

HELP = "fetch a model, list those that are here, say where one is, convert a .gguf file"
EXAMPLE = "cotrt model fetch smollm2-135m; cotrt model convert model.gguf folder; cotrt model list"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    fetch = verbs.add_parser("fetch", help="fetch it, unless it is here already")
    where = verbs.add_parser("path", help="print the folder or file that it is loaded from")
    for each in (fetch, where):
        each.add_argument("model", help="hub id or smollm2-135m")
        each.add_argument("--revision", help="branch, tag or commit of a hub id")
    verbs.add_parser("list", help="list the models that are here")
    convert = verbs.add_parser(
        "convert", help="write a .gguf file as a folder of safetensors, in bfloat16"
    )
    convert.add_argument("gguf", help="the .gguf file")
    convert.add_argument("folder", help="a folder that is not there yet")


def run(options: argparse.Namespace) -> int:
    """Do what the verb says."""
    if options.verb == "list":
        return _list()
    if options.verb == "convert":
        return _convert(Path(options.gguf), Path(options.folder))
    from cotrt.models import hub

    if options.verb == "path":
        import os

        # The hub's own switch: what is not here is an error, not a download.
        os.environ["HF_HUB_OFFLINE"] = "1"
        if options.model == "smollm2-135m":
            from cotrt.errors import ModelLoadError
            from cotrt.models.starter import is_ready

            if not is_ready():
                raise ModelLoadError("smollm2-135m is not here: cotrt model fetch smollm2-135m")
    found = hub.find(options.model, revision=options.revision)
    print(found.gguf or found.folder)
    return 0


def _list() -> int:
    from cotrt.models import starter

    rows: list[tuple[str, int, Path]] = []
    if starter.is_ready():
        folder = starter.starter_folder()
        rows.append(("smollm2-135m", starter._bytes_below(folder), folder))
    for name, size, folder in _hub_models():
        rows.append((name, size, folder))
    for name, size, folder in rows:
        print(f"{name:<40} {size / (1 << 30):7.2f} GiB  {folder}")
    if not rows:
        print("no models here: cotrt model fetch smollm2-135m")
    return 0


def _hub_models() -> list[tuple[str, int, Path]]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir()
    except (CacheNotFound, OSError, ValueError):
        return []
    models = [repo for repo in cache.repos if repo.repo_type == "model"]
    found = [(repo.repo_id, repo.size_on_disk, Path(repo.repo_path)) for repo in models]
    return sorted(found)


def _convert(gguf: Path, folder: Path) -> int:
    from cotrt.errors import InvalidRequestError
    from cotrt.models import starter
    from cotrt.models.gguf import GgufSource

    if not gguf.is_file():
        raise InvalidRequestError(f"{gguf} is not there")
    if folder.exists():
        raise InvalidRequestError(f"{folder} exists already: name a folder that does not")
    folder.mkdir(parents=True)
    starter._convert(gguf, folder, None)
    # The file's own settings, as it is loaded by; transformers' reader knows fewer of them.
    source = GgufSource(gguf)
    own = {name: value for name, value in source.config().items() if value is not None}
    source.close()
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config.pop("rope_parameters", None)
    config.update(own, dtype="bfloat16")
    config["architectures"] = [f"{config['model_type'].capitalize()}ForCausalLM"]
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    print(folder)
    return 0
