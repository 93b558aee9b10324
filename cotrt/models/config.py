"""What a model is: read from ``config.json`` once, checked, and frozen.

Families differ by data only (`Family`): one decoder serves them all.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ModelLoadError
from .rope import RopeConfig

logger = logging.getLogger("cotrt")


@dataclass(frozen=True)
class Family:
    """What a model family fixes beyond its config.

    Attributes:
        architecture: class name in ``architectures`` of a config.json.
        qkv_bias: biases of q, k and v: always, never, or as ``attention_bias`` says (None).
        o_bias: bias of the output projection, likewise.
        mlp_bias: as ``mlp_bias`` says (None), or never.
        qk_norm: q and k heads are RMS-normalised before the rotation.
        defaults: values of keys that a config may leave out.
        sliding: where a sliding window applies: ``never``, in ``all`` layers that have one, or
            only with ``use_sliding_window`` (``flag``).
        head_dim: a fixed default of the head size; None: hidden size / heads.
    """

    architecture: str
    qkv_bias: bool | None
    o_bias: bool | None
    mlp_bias: bool | None
    qk_norm: bool
    defaults: Mapping[str, Any]
    sliding: str = "never"
    head_dim: int | None = None


_COMMON = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu"}

FAMILIES: dict[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM", None, None, None, False, {**_COMMON, "max_position_embeddings": 2048}
    ),
    "mistral": Family(
        "MistralForCausalLM", False, False, False, False,
        {
            **_COMMON, "max_position_embeddings": 131072, "num_key_value_heads": 8,
            "sliding_window": 4096,
        },
        sliding="all",
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM", True, False, False, False,
        {
            **_COMMON, "max_position_embeddings": 32768, "num_key_value_heads": 32,
            "sliding_window": 4096, "max_window_layers": 28,
        },
        sliding="flag",
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM", None, None, False, True,
        {
            **_COMMON, "max_position_embeddings": 32768, "num_key_value_heads": 32,
            "sliding_window": 4096, "max_window_layers": 28,
        },
        sliding="flag",
        head_dim=128,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and constants of one decoder.

    Attributes:
        family: key of `FAMILIES`.
        vocab_size: rows of the embedding and of the head; may exceed the tokenizer's.
        max_model_len: the longest sequence it is right for (rope and sliding window considered).
        max_model_len_reason: why a longer sequence would be wrong; None where the rotation merely
            was not trained beyond it.
        sliding_window: tokens of the window, None where no layer has one.
        dtype: of the checkpoint, as the config names it: "float32", "bfloat16", "float16", or None.
        raw: the config as read.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_model_len: int
    max_model_len_reason: str | None
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    sliding_window: int | None
    dtype: str | None
    raw: Mapping[str, Any]

    @property
    def q_size(self) -> int:
        return self.num_q_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Read ``folder/config.json``.

        Raises:
            ModelLoadError: it is missing, no JSON, or of a model that is not supported.
        """
        return cls.from_dict(read_json(folder / "config.json", required=True), str(folder))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], where: str = "config") -> ModelConfig:
        """Check a config and fill in what its family leaves out.

        Args:
            raw: the contents of a config.json, in either style of rope settings.
            where: named in messages.

        Raises:
            ModelLoadError: an unsupported family or setting, or a missing or impossible value.
        """
        name = raw.get("model_type")
        family = FAMILIES.get(name) if isinstance(name, str) else None
        if family is None or not isinstance(name, str):
            custom = " Its own code (auto_map) is never run." if "auto_map" in raw else ""
            raise ModelLoadError(
                f"{where}: model_type {name!r} is not supported (supported: "
                f"{', '.join(FAMILIES)}).{custom} Use a model of one of these families."
            )
        architectures = raw.get("architectures") or [family.architecture]
        # A bare LlamaModel may have its head beside it or tied; a classifier has another one.
        bare = family.architecture.replace("ForCausalLM", "Model")
        if not any(str(a).endswith("ForCausalLM") or a == bare for a in architectures):
            raise ModelLoadError(
                f"{where}: architecture {architectures} is not a causal language model; "
                f"{family.architecture} is needed."
            )
        quantised = raw.get("quantization_config")
        if quantised and not _multiplies_out(quantised):
            method = dict(quantised).get("quant_method", "unknown")
            raise ModelLoadError(
                f"{where}: the checkpoint is quantised ({method}), which is not in this version. "
                "Use the unquantised checkpoint, or a .gguf file (dequantised on load)."
            )
        get = _Reader({**family.defaults, **{k: v for k, v in raw.items() if v is not None}}, where)
        # Null is a value of these, and not the same as leaving the key out.
        for key in ("sliding_window", "num_key_value_heads"):
            if key in raw and raw[key] is None:
                get.values.pop(key, None)
        act = get.values.get("hidden_act")
        if act != "silu":
            raise ModelLoadError(f"{where}: hidden_act {act!r} is not supported; silu is.")
        hidden, heads = get.count("hidden_size"), get.count("num_attention_heads")
        kv_heads = get.count("num_key_value_heads", heads)
        head_dim = get.count("head_dim", family.head_dim or hidden // heads)
        if heads % kv_heads:
            raise ModelLoadError(
                f"{where}: num_attention_heads {heads} is not a multiple of "
                f"num_key_value_heads {kv_heads}."
            )
        if head_dim % 2:
            raise ModelLoadError(f"{where}: head_dim {head_dim} is odd; rotation needs pairs.")
        num_layers = get.count("num_hidden_layers")
        attention_bias, mlp_bias = get.flag("attention_bias"), get.flag("mlp_bias")
        rope = RopeConfig.from_config(get.values, head_dim, where)
        window = _sliding_window(family, get, num_layers)
        max_len, reason = _limits(rope, window)
        return cls(
            family=name,
            vocab_size=get.count("vocab_size"),
            hidden_size=hidden,
            intermediate_size=get.count("intermediate_size"),
            num_layers=num_layers,
            num_q_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=get.number("rms_norm_eps"),
            rope=rope,
            max_model_len=max_len,
            max_model_len_reason=reason,
            qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
            o_bias=attention_bias if family.o_bias is None else family.o_bias,
            mlp_bias=mlp_bias if family.mlp_bias is None else family.mlp_bias,
            qk_norm=family.qk_norm,
            tie_word_embeddings=get.flag("tie_word_embeddings"),
            sliding_window=window,
            dtype=_dtype_name(raw),
            raw=dict(raw),
        )


def _multiplies_out(quantised: Any) -> bool:
    """Weights of 8 bits beside scales by a rule that `ReadableWeights` knows."""
    if not isinstance(quantised, dict) or quantised.get("quant_method") != "fp8":
        return False
    return quantised.get("weight_block_size") in (None, [128, 128])


class _Reader:
    """Typed reads with messages that name the key."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def count(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key, default)
        if value is None:
            raise ModelLoadError(f"{self.where}: config.json has no {key}.")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelLoadError(f"{self.where}: {key} must be a positive integer, got {value!r}.")
        return value

    def number(self, key: str) -> float:
        value = self.values.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
            raise ModelLoadError(f"{self.where}: {key} must be a number >= 0, got {value!r}.")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.values.get(key, False)
        if not isinstance(value, bool):
            raise ModelLoadError(f"{self.where}: {key} must be true or false, got {value!r}.")
        return value


def _sliding_window(family: Family, get: _Reader, num_layers: int) -> int | None:
    """The window of the layers that slide; None where none does."""
    if family.sliding == "never" or get.values.get("sliding_window") is None:
        return None
    if family.sliding == "flag":
        if not get.flag("use_sliding_window"):
            return None
        layer_types = get.values.get("layer_types")
        if layer_types is None:
            first = get.values.get("max_window_layers", 0)
            layer_types = ["sliding_attention" if i >= first else "full" for i in range(num_layers)]
        if "sliding_attention" not in layer_types:
            return None
    return get.count("sliding_window")


def _limits(rope: RopeConfig, window: int | None) -> tuple[int, str | None]:
    """The longest right sequence, and why a longer one would be wrong."""
    length, reason = rope.max_length, None
    if rope.rope_type == "dynamic":
        reason = (
            "dynamic rope scaling changes the keys of earlier tokens as a sequence grows beyond "
            f"{length} tokens, so their KV could be neither shared nor computed in chunks"
        )
    if window is not None and window < length:
        length = window
        reason = (
            f"the model attends through a sliding window of {window} tokens, which cotrt serves "
            "only up to the window's length, where it equals full attention"
        )
    return length, reason


def _dtype_name(raw: Mapping[str, Any]) -> str | None:
    value = raw.get("dtype") or raw.get("torch_dtype")
    return None if value is None else str(value).removeprefix("torch.")


def read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    """A JSON object from a file; ``{}`` where an optional one is missing.

    Raises:
        ModelLoadError: a required file is missing, or any is not a JSON object.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        if not required:
            return {}
        raise ModelLoadError(
            f"{path.parent} has no {path.name}: it is not a model folder, or its download did not "
            "end. Give a folder of safetensors, a .gguf file or a hub id."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ModelLoadError(
            f"{path} is not valid JSON ({error}): it is damaged or half-downloaded; get it again."
        ) from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, got {type(value).__name__}.")
    return value
