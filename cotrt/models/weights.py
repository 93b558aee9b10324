"""Where weights come from: named tensors seen through a memory map, checked against a table.

A `WeightSource` hands out tensors by their canonical names (those of a transformers checkpoint)
without copying: what is not read is not loaded. Mapped tensors can be aligned to 8 bytes only,
and vanish with the source, so whoever keeps a weight copies it (`Decoder` merges while copying; a
native backend packs straight from the map).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import ModelLoadError
from .config import ModelConfig, read_json

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

logger = logging.getLogger("cotrt")

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")
# Recomputed from the config: old checkpoints carry them.
_IGNORED = re.compile(r"rotary_emb\.inv_freq$|\.attn\.(masked_)?bias$")


class WeightSource(Protocol):
    """Named tensors behind a memory map."""

    def names(self) -> Collection[str]:
        """Canonical names of all tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it."""

    def get(self, name: str) -> Tensor:
        """A tensor: mapped where its storage allows; do not write to it, do not outlive close."""

    def kind(self, name: str) -> str:
        """The dtype that `get` gives, ``bfloat16`` say."""

    def files(self) -> Sequence[Path]:
        """The files that it reads."""

    def stored(self, name: str) -> tuple[str, npt.NDArray[np.uint8]]:
        """How a tensor's elements are stored, and its bytes in the map."""

    def close(self) -> None:
        """Give the maps back."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor that a model needs: its canonical name and its shape."""

    name: str
    shape: tuple[int, ...]


def tensor_table(config: ModelConfig) -> tuple[list[TensorSpec], list[dict[str, TensorSpec]]]:
    """What a checkpoint of this config must hold.

    Returns:
        The tensors outside the layers, and one dict a layer from role (``q``, ``q_bias``, ...,
        ``input_norm``) to tensor. The same roles in every layer.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    outer = [
        TensorSpec("model.embed_tokens.weight", (config.vocab_size, hidden)),
        TensorSpec("model.norm.weight", (hidden,)),
    ]
    if not config.tie_word_embeddings:
        outer.append(TensorSpec("lm_head.weight", (config.vocab_size, hidden)))
    rows: list[tuple[str, str, tuple[int, ...], bool]] = [
        ("input_norm", "input_layernorm", (hidden,), False),
        ("q", "self_attn.q_proj", (config.q_size, hidden), config.qkv_bias),
        ("k", "self_attn.k_proj", (config.kv_size, hidden), config.qkv_bias),
        ("v", "self_attn.v_proj", (config.kv_size, hidden), config.qkv_bias),
        ("o", "self_attn.o_proj", (hidden, config.q_size), config.o_bias),
        ("post_norm", "post_attention_layernorm", (hidden,), False),
        ("gate", "mlp.gate_proj", (inner, hidden), config.mlp_bias),
        ("up", "mlp.up_proj", (inner, hidden), config.mlp_bias),
        ("down", "mlp.down_proj", (hidden, inner), config.mlp_bias),
    ]
    if config.qk_norm:
        rows += [
            ("q_norm", "self_attn.q_norm", (config.head_dim,), False),
            ("k_norm", "self_attn.k_norm", (config.head_dim,), False),
        ]
    layers = []
    for index in range(config.num_layers):
        layer: dict[str, TensorSpec] = {}
        for role, stem, shape, bias in rows:
            name = f"model.layers.{index}.{stem}"
            layer[role] = TensorSpec(f"{name}.weight", shape)
            if bias:
                layer[f"{role}_bias"] = TensorSpec(f"{name}.bias", shape[:1])
        layers.append(layer)
    return outer, layers


def check_tensors(source: WeightSource, config: ModelConfig, where: str) -> None:
    """Name every missing, surplus and misshapen tensor of a source.

    Surplus tensors are a warning, but for those that say that the config is not this
    checkpoint's: more layers, or biases and head norms of layers it has.

    Raises:
        ModelLoadError: a tensor is missing, has another shape, or contradicts the config.
    """
    outer, layers = tensor_table(config)
    wanted = {spec.name: spec.shape for spec in outer}
    wanted.update((spec.name, spec.shape) for layer in layers for spec in layer.values())
    names = set(source.names())
    missing = [name for name in wanted if name not in names]
    surplus = sorted(n for n in names - wanted.keys() if not _IGNORED.search(n))
    misshapen = [
        f"{name} {list(source.shape(name))}, should be {list(shape)}"
        for name, shape in wanted.items()
        if name in names and source.shape(name) != shape
    ]
    stems = {name.rsplit(".", 1)[0] for name in wanted}
    norm = re.compile(r"self_attn\.[qk]_norm\.weight$")
    numbers = {int(found[1]) for name in names if (found := _LAYER.match(name))}
    num_layers = max(numbers, default=-1) + 1
    contradicting = [
        n
        for n in surplus
        if (n.endswith(".bias") and n.rsplit(".", 1)[0] in stems)
        or (norm.search(n) and not config.qk_norm)
    ]
    problems = []
    if num_layers > config.num_layers:
        problems.append(f"{num_layers} layers, where config.json says {config.num_layers}")
    if missing:
        problems.append(f"missing tensors: {_some(missing)}")
    if misshapen:
        problems.append(f"tensors of another shape: {_some(misshapen)}")
    if contradicting:
        problems.append(f"tensors that config.json says are not there: {_some(contradicting)}")
    if problems:
        if surplus:
            problems.append(f"tensors that are not the model's: {_some(surplus)}")
        raise ModelLoadError(
            f"{where} does not fit its config.json: {'; '.join(problems)}. The checkpoint is "
            "damaged or incomplete, or the config is another model's; get both again."
        )
    if config.tie_word_embeddings and "lm_head.weight" in surplus:
        logger.warning(
            "%s: lm_head.weight ignored: config.json says that the head is the embedding.", where
        )
        surplus.remove("lm_head.weight")
    if surplus:
        logger.warning("%s: ignored tensors that are not the model's: %s", where, _some(surplus))


def _some(items: Sequence[str], limit: int = 12) -> str:
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more


class SafetensorsSource:
    """A folder of safetensors: one file, or shards with an index that decides."""

    def __init__(self, files: Mapping[Path, Sequence[str] | None]) -> None:
        """Map files.

        Args:
            files: each file with the names to take from it (None: all that it has).

        Raises:
            ModelLoadError: a file is missing, cut short, no safetensors, or lacks a name.
        """
        self._stack: list[AbstractContextManager[Any]] = []
        self._where: dict[str, Any] = {}
        self._files = list(files)
        try:
            for path, names in files.items():
                self._open(path, names)
        except BaseException:
            self.close()
            raise
        self._prefix = self._base_model_prefix()

    def _open(self, path: Path, names: Sequence[str] | None) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            manager: AbstractContextManager[Any] = safe_open(str(path), framework="pt")
            file = manager.__enter__()
        except FileNotFoundError:
            raise ModelLoadError(
                f"shard {path.name} is missing from {path.parent}: the download did not end; "
                "get the model again."
            ) from None
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelLoadError(
                f"{path} is not a whole safetensors file ({error}): it is damaged or "
                "half-downloaded; delete it and get it again."
            ) from error
        self._stack.append(manager)
        have = set(file.keys())
        if names is None:
            names = sorted(have)
        absent = [name for name in names if name not in have]
        if absent:
            raise ModelLoadError(
                f"{path} lacks tensors that the index places in it: {_some(absent)}. "
                "File and index are not of the same checkpoint; get both again."
            )
        for name in names:
            self._where[name] = file

    def _base_model_prefix(self) -> str:
        """``model.`` where the checkpoint was saved without its head, so lacks that prefix."""
        bare = "embed_tokens.weight" in self._where
        return "model." if bare and "model.embed_tokens.weight" not in self._where else ""

    def _stored(self, name: str) -> str:
        return name.removeprefix(self._prefix) if name != "lm_head.weight" else name

    def names(self) -> Collection[str]:
        return [n if n == "lm_head.weight" else self._prefix + n for n in self._where]

    def shape(self, name: str) -> tuple[int, ...]:
        stored = self._stored(name)
        return tuple(self._where[stored].get_slice(stored).get_shape())

    def get(self, name: str) -> Tensor:
        stored = self._stored(name)
        tensor: Tensor = self._where[stored].get_tensor(stored)
        return tensor

    def kind(self, name: str) -> str:
        return str(self.get(name).dtype).removeprefix("torch.")

    def files(self) -> Sequence[Path]:
        return self._files

    def stored(self, name: str) -> tuple[str, npt.NDArray[np.uint8]]:
        import torch

        values = self.get(name)
        return str(values.dtype), values.flatten().view(torch.uint8).numpy()

    def close(self) -> None:
        self._where = {}
        while self._stack:
            self._stack.pop().__exit__(None, None, None)


def open_weights(folder: Path) -> SafetensorsSource:
    """Map the weights of a model folder. An index decides; stray files are named and ignored.

    Raises:
        ModelLoadError: no safetensors (pickled weights are never opened), a missing or damaged
            file, an index that is not one.
    """
    index, single = folder / INDEX_NAME, folder / SINGLE_NAME
    found = sorted(path for path in folder.glob("*.safetensors"))
    files: dict[Path, Sequence[str] | None]
    if index.exists():
        files = _indexed_files(index)
    elif single.exists():
        files = {single: None}
    elif len(found) == 1:
        files = {found[0]: None}
    elif found:
        raise ModelLoadError(
            f"{folder} has {len(found)} safetensors files but no {INDEX_NAME} that says which "
            "tensor is where: the download did not end; get the model again."
        )
    else:
        raise ModelLoadError(_no_weights(folder))
    strays = [path.name for path in found if path not in files]
    if strays:
        logger.warning(
            "%s: ignored files that %s does not name: %s",
            folder,
            INDEX_NAME if index.exists() else "the model",
            _some(strays),
        )
    return SafetensorsSource(files)


def _indexed_files(index: Path) -> dict[Path, Sequence[str] | None]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{index} has no weight_map: it is damaged; get it again.")
    by_file: dict[Path, list[str]] = {}
    for name, file in weight_map.items():
        # A name with a folder in it could point anywhere on this machine.
        if not isinstance(file, str) or Path(file).name != file:
            raise ModelLoadError(f"{index} places {name} in {file!r}, which is no file name.")
        by_file.setdefault(index.parent / file, []).append(name)
    missing = [path.name for path in by_file if not path.exists()]
    if missing:
        raise ModelLoadError(
            f"{index.parent} lacks shards that its index names: {_some(missing)}. The download "
            "did not end; get the model again."
        )
    return dict(by_file)


def _no_weights(folder: Path) -> str:
    pickled = [p.name for p in folder.glob("*.bin")] + [p.name for p in folder.glob("*.pt*")]
    if pickled:
        return (
            f"{folder} has pickled weights only ({_some(sorted(pickled))}), which could run any "
            "code when opened. Convert them once where you trust them: load the model with "
            "transformers and save_pretrained(..., safe_serialization=True)."
        )
    gguf = sorted(path.name for path in folder.glob("*.gguf"))
    if gguf:
        return f"{folder} has no safetensors; give the path of its .gguf file: {_some(gguf)}."
    return f"{folder} has no safetensors: the download did not end, or it is no model folder."


# Of fingerprints that cover every byte. Older ones, of a sample of the values, begin otherwise.
_FULL = "full-"


def covers_every_byte(mark: str) -> bool:
    """Whether a fingerprint was made of every byte of a model's weights."""
    return mark.startswith(_FULL)


def fingerprint(source: WeightSource, config: ModelConfig) -> str:
    """A hash of the config and of every byte of every tensor.

    Two models with the same fingerprint compute the same KV. The weights are read for it once: the
    hash is kept (`kept_hash`). How they are spread over files says nothing.

    Raises:
        ModelLoadError: a file cannot be read, or changes meanwhile.
    """
    from .content_hash import kept_hash

    digest = hashlib.sha256()
    shown = {k: v for k, v in config.raw.items() if k not in ("_name_or_path", "dtype")}
    digest.update(json.dumps(shown, sort_keys=True, default=str).encode())
    digest.update(kept_hash("sha256 of tensors", source.files(), lambda: _hash_tensors(source)))
    return _FULL + digest.hexdigest()[:32]


def _hash_tensors(source: WeightSource) -> bytes:
    def one(name: str) -> bytes:
        kind, data = source.stored(name)
        head = f"{name}{source.shape(name)}{kind}:".encode()
        # Hashing lets other threads run meanwhile.
        return head + hashlib.sha256(data.data).digest()

    whole = hashlib.sha256()
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1), "cotrt-hash") as threads:
        for part in threads.map(one, sorted(source.names())):
            whole.update(part)
    return whole.digest()
