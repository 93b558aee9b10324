""".gguf files of the supported families: config, weights and tokenizer, through the gguf package.

llama.cpp stores the rows of q and k of its ``llama`` architecture in another order (pairs side by
side, for its interleaved rotation); they are put back here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ModelLoadError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

# GGUF's architecture name -> our family. llama.cpp files Mistral under llama.
_ARCHITECTURES = {"llama": "llama", "mistral": "mistral", "qwen2": "qwen2", "qwen3": "qwen3"}
_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"
# As llama.cpp names the parts of a split file.
_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


class GgufSource:
    """Tensors of a .gguf file under canonical names, dequantised to float32 as they are read.

    A split file is read with all its parts, whichever is given.

    Attributes:
        path: the file; of a split one the first part, which has the metadata.
        architecture: ``general.architecture``.
        rope_factors: of stretched Llamas.
    """

    def __init__(self, path: Path) -> None:
        """Map a file.

        Raises:
            ModelLoadError: it is missing, no GGUF, cut short, of another architecture, or one of
                its parts is missing or another file's.
        """
        given = _open_reader(path)
        self._files, self._readers = [path], [given]
        count = _field(given, "split.count", 0)
        if count > 1:
            self._files = _parts(path, count)
            self._readers = [given if p == path else _open_reader(p) for p in self._files]
            self._check_parts(count)
        self.path = self._files[0]
        self.architecture = str(self.field("general.architecture"))
        if self.architecture not in _ARCHITECTURES:
            raise ModelLoadError(
                f"{path}: GGUF architecture {self.architecture!r} is not supported (supported: "
                f"{', '.join(_ARCHITECTURES)})."
            )
        self._tensors: dict[str, Any] = {}
        self.rope_factors: list[float] | None = None
        for reader in self._readers:
            for tensor in reader.tensors:
                if tensor.name == _ROPE_FACTORS:
                    self.rope_factors = [float(value) for value in tensor.data]
                else:
                    self._tensors[_canonical(tensor.name)] = tensor

    def _check_parts(self, count: int) -> None:
        """Every part is of one split, and they have all its tensors, each once."""
        totals = set()
        for number, (path, reader) in enumerate(zip(self._files, self._readers, strict=True)):
            if _field(reader, "split.count", 0) != count or _field(reader, "split.no") != number:
                raise ModelLoadError(
                    f"{path} is not part {number + 1} of the {count} parts of one split model: "
                    "another file has its name; get the model again."
                )
            totals.add(_field(reader, "split.tensors.count"))
        names = Counter(tensor.name for reader in self._readers for tensor in reader.tensors)
        twice = [name for name, times in names.items() if times > 1]
        if twice or totals != {len(names)}:
            what = (
                f"tensor {twice[0]} stands in two of them"
                if twice
                else (
                    f"they hold {len(names)} tensors, by their own count {sorted(map(str, totals))}"
                )
            )
            raise ModelLoadError(
                f"{self._files[0]} and the parts beside it are not parts of one split model "
                f"({what}); get the model again."
            )

    def field(self, key: str, default: Any = None) -> Any:
        """A metadata value, or ``default``."""
        return _field(self._readers[0], key, default)

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def get(self, name: str) -> Tensor:
        import numpy as np
        import torch
        from gguf import dequantize

        tensor = self._tensors[name]
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise ModelLoadError(
                f"{self.path}: {name} has quantisation {tensor.tensor_type.name}, which the gguf "
                "package cannot read; use another quantisation of the model."
            ) from error
        if self.architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            key = "head_count" if ".q_proj." in name else "head_count_kv"
            heads = self.field(f"llama.attention.{key}") or self.field("llama.attention.head_count")
            values = _unpermute(values, int(heads))
        # A copy only where the values lie in the map itself or out of order.
        if not values.flags.writeable or not values.flags.c_contiguous:
            values = np.array(values, order="C")
        return torch.from_numpy(values)

    def kind(self, name: str) -> str:
        return "float32"

    def files(self) -> Sequence[Path]:
        return self._files

    def stored(self, name: str) -> tuple[str, npt.NDArray[np.uint8]]:
        import numpy as np

        tensor = self._tensors[name]
        return tensor.tensor_type.name, np.ascontiguousarray(tensor.data).reshape(-1).view(np.uint8)

    @property
    def dtype(self) -> str:
        """The dtype to serve in: the stored one, bfloat16 where the weights are quantised."""
        embed = self._tensors.get("model.embed_tokens.weight", self._tensors.get("lm_head.weight"))
        stored = "" if embed is None else embed.tensor_type.name
        return {"F32": "float32", "F16": "float16"}.get(stored, "bfloat16")

    def close(self) -> None:
        self._tensors = {}
        self._readers = []

    def config(self) -> dict[str, Any]:
        """The file's metadata as a config.json would say it."""
        arch = self.architecture

        def own(key: str, default: Any = None) -> Any:
            return self.field(f"{arch}.{key}", default)

        heads = own("attention.head_count")
        names = self.names()
        config = {
            "model_type": _ARCHITECTURES[arch],
            "vocab_size": self.shape("model.embed_tokens.weight")[0]
            if "model.embed_tokens.weight" in names
            else self.shape("lm_head.weight")[0]
            if "lm_head.weight" in names
            else own("vocab_size"),
            "hidden_size": own("embedding_length"),
            "intermediate_size": own("feed_forward_length"),
            "num_hidden_layers": own("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": own("attention.head_count_kv", heads),
            "head_dim": own("attention.key_length") or own("rope.dimension_count"),
            "max_position_embeddings": own("context_length"),
            "rms_norm_eps": own("attention.layer_norm_rms_epsilon"),
            "rope_theta": own("rope.freq_base", 10_000.0),
            "rope_scaling": self._rope_scaling(),
            "tie_word_embeddings": not {"lm_head.weight", "model.embed_tokens.weight"} <= {*names},
            "attention_bias": "model.layers.0.self_attn.q_proj.bias" in names,
            "mlp_bias": "model.layers.0.mlp.up_proj.bias" in names,
            "sliding_window": own("attention.sliding_window"),
            "bos_token_id": self.field("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self._eos_token_ids(),
            "dtype": self.dtype,
        }
        return {k: v for k, v in config.items() if v is not None or k == "sliding_window"}

    def _rope_scaling(self) -> dict[str, Any] | None:
        arch = self.architecture
        kind = self.field(f"{arch}.rope.scaling.type")
        if self.rope_factors is not None:
            return {"rope_type": "default", "freq_factors": self.rope_factors}
        if kind in (None, "none"):
            # Before scaling had a type, a lone linear factor stood here.
            linear = self.field(f"{arch}.rope.scale_linear")
            return None if linear in (None, 1.0) else {"rope_type": "linear", "factor": linear}
        scaling = {"rope_type": kind, "factor": self.field(f"{arch}.rope.scaling.factor")}
        original = self.field(f"{arch}.rope.scaling.original_context_length")
        attention = self.field(f"{arch}.rope.scaling.attn_factor")
        if original:
            scaling["original_max_position_embeddings"] = original
        if attention:
            scaling["attention_factor"] = attention
        return scaling

    def _eos_token_ids(self) -> list[int]:
        keys = ("eos_token_id", "eot_token_id", "eom_token_id")
        ids = [self.field(f"tokenizer.ggml.{key}") for key in keys]
        return sorted({int(i) for i in ids if i is not None})


def _field(reader: Any, key: str, default: Any = None) -> Any:
    entry = reader.fields.get(key)
    return default if entry is None else entry.contents()


def _open_reader(path: Path) -> Any:
    from gguf import GGUFReader

    try:
        return GGUFReader(str(path))
    except FileNotFoundError:
        raise ModelLoadError(f"{path} does not exist.") from None
    except (ValueError, OSError, IndexError, KeyError) as error:
        raise ModelLoadError(
            f"{path} is not a whole GGUF file ({error}): it is damaged or half-downloaded; "
            "delete it and get it again."
        ) from error


def _parts(path: Path, count: int) -> list[Path]:
    """All parts of a split file, first to last.

    Raises:
        ModelLoadError: its name does not say where they are, or one is missing.
    """
    named = _PART.fullmatch(path.name)
    if named is None or int(named["count"]) != count:
        raise ModelLoadError(
            f"{path} is one of {count} parts of a split model, but its name does not say which: "
            f"name the parts as they were, NAME-00001-of-{count:05d}.gguf and so on."
        )
    parts = [
        path.with_name(f"{named['stem']}-{number + 1:05d}-of-{count:05d}.gguf")
        for number in range(count)
    ]
    missing = [part.name for part in parts if not part.exists()]
    if missing:
        raise ModelLoadError(
            f"{path} is one of {count} parts of a split model, and {', '.join(missing[:8])} "
            f"{'is' if len(missing) == 1 else 'are'} not beside it: get all parts."
        )
    return parts


def _canonical(name: str) -> str:
    """A GGUF tensor name as a transformers checkpoint has it; unknown ones stay as they are."""
    if name in _OUTER:
        return _OUTER[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER:
        return f"model.layers.{parts[1]}.{_LAYER[parts[2]]}.{parts[3]}"
    return name


def _unpermute(values: Any, num_heads: int) -> Any:
    """Rows of each head from ``(pair, half)`` back to ``(half, pair)``."""
    half = values.shape[0] // num_heads // 2
    pairs = values.reshape(num_heads, half, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def open_tokenizer(path: Path) -> Any:
    """The file's tokenizer as a transformers fast tokenizer.

    Raises:
        ModelLoadError: the file has none that transformers can read, or its vocabulary splits texts
            by a rule that is not known.
    """
    from transformers import AutoTokenizer

    from .gguf_splits import set_split

    source = GgufSource(path)
    path = source.path
    kind, split = (source.field(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    source.close()
    if kind not in ("llama", "gpt2"):
        raise ModelLoadError(
            f"{path}: its vocabulary is of the kind {kind!r} (tokenizer.ggml.model), which is not "
            "supported (supported: llama, gpt2); give tokenizer=, a folder or hub id."
        )
    try:
        opened = AutoTokenizer.from_pretrained(
            str(path.parent), gguf_file=path.name, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:
        raise ModelLoadError(
            f"{path}: its tokenizer cannot be read ({error}); give tokenizer=, a folder or hub id."
        ) from error
    if kind == "gpt2":
        set_split(opened.backend_tokenizer, split, str(path))
    return opened
