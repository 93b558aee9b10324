"""Weights as a decoder reads them: 8-bit tensors times the scales that lie beside them.

Quantised checkpoints store ``w = q * scale`` under names of their own:

    scale name                      from                          rule
    weight_scale, weight_scale_inv  compressed-tensors, ModelOpt,  w = q * scale, for the tensor, an
                                    DeepSeek, transformers' fp8    output, or a block of 128 x 128
    scale_weight                    ComfyUI                        the same
    SCB                             bitsandbytes (LLM.int8)        w = q * scale / 127, an output

Scales of activations and of KV do not change a weight. A rule that is not known is refused: without
its scale a tensor is noise, and nothing would say so.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ModelLoadError
from .config import ModelConfig
from .weights import WeightSource, tensor_table

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

logger = logging.getLogger("cotrt")

_FACTORS = {"weight_scale": 1.0, "weight_scale_inv": 1.0, "scale_weight": 1.0, "SCB": 1 / 127}
_HARMLESS = ("input_scale", "output_scale", "scale_input", "k_scale", "v_scale")
_EIGHT_BITS = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "int8")
_PLAIN = ("float32", "bfloat16", "float16", "float64")
_BLOCK = 128
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class ReadableWeights:
    """A source whose tensors are all plain numbers.

    Args:
        source: of the checkpoint; closed with this.
        config: of the model. Where it ties head and embedding, and the file has the matrix under
            the head's name alone, it is found as the embedding.
        where: the checkpoint, for errors.

    Raises:
        ModelLoadError: 8-bit tensors without a scale, or scales whose rule is not known.
    """

    def __init__(self, source: WeightSource, config: ModelConfig, where: str) -> None:
        self._source, self._where = source, where
        names = set(source.names())
        self._moved: dict[str, str] = {}
        if config.tie_word_embeddings and _HEAD in names and _EMBEDDING not in names:
            self._moved[_EMBEDDING] = _HEAD
        outer, layers = tensor_table(config)
        self._wanted = {spec.name for spec in outer}
        self._wanted.update(spec.name for layer in layers for spec in layer.values())
        self._scales: dict[str, tuple[str, float]] = {}
        harmless, used = set(), set()
        for name in sorted(names):
            stem, _, last = name.rpartition(".")
            weight = f"{stem}.weight"
            if last in _FACTORS and weight in names:
                if weight in self._scales:
                    raise ModelLoadError(
                        f"{where}: {weight} has two scales, {self._scales[weight][0]} and {name}: "
                        "which of them counts is not known."
                    )
                self._scales[weight] = name, _FACTORS[last]
                used.add(name)
            elif last in _HARMLESS:
                harmless.add(name)
        for name in sorted(names - used - harmless):
            self._check(name, config)
        if harmless:
            logger.info(
                "%s: %d scales of activations or KV are not used: rows and KV are not quantised",
                where,
                len(harmless),
            )
        self._names = [*self._moved, *(names - used - harmless - set(self._moved.values()))]
        if self._scales:
            logger.info("%s: %d 8-bit weights are multiplied out", where, len(self._scales))

    def _check(self, name: str, config: ModelConfig) -> None:
        """A tensor is plain, or has a scale whose rule is known."""
        kind = self._source.kind(name)
        scale = self._scales.get(name)
        if scale is None:
            if kind.startswith("float8") or kind in ("int8", "uint8"):
                raise ModelLoadError(
                    f"{self._where}: {name} is stored as {kind} without a scale that is known "
                    f"({', '.join(_FACTORS)}), so its values are not. Get the model in 16 bits, or "
                    "as a .gguf file."
                )
            if kind not in _PLAIN and self._moved.get(name, name) in self._wanted:
                raise ModelLoadError(
                    f"{self._where}: {name} is stored as {kind}, which is no kind of weights "
                    f"(known: {', '.join(_PLAIN)}). The checkpoint is damaged or quantised."
                )
            return
        shape, of = self._source.shape(scale[0]), self._source.shape(name)
        by_block = len(of) == 2 and shape == tuple(-(-size // _BLOCK) for size in of)
        by_output = shape in ((of[0],), (of[0], 1))
        if kind in _EIGHT_BITS and (shape in ((), (1,), (1, 1)) or by_output or by_block):
            return
        raise ModelLoadError(
            f"{self._where}: {name}, {kind} {list(of)}, has a scale {scale[0]} {list(shape)}: the "
            "rule for that is not known (known: 8 bits with a scale for the tensor, for each "
            f"output, or for {_BLOCK} x {_BLOCK} blocks). Get the model in 16 bits, or as a .gguf "
            "file."
        )

    def names(self) -> Collection[str]:
        return self._names

    def files(self) -> Sequence[Path]:
        return self._source.files()

    def kind(self, name: str) -> str:
        return "float32" if name in self._scales else self._source.kind(self._stored(name))

    def stored(self, name: str) -> tuple[str, npt.NDArray[np.uint8]]:
        return self._source.stored(self._stored(name))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(self._stored(name))

    def get(self, name: str) -> Tensor:
        stored = self._stored(name)
        values = self._source.get(stored)
        if stored not in self._scales:
            return values
        name, factor = self._scales[stored]
        scale = self._source.get(name).float() * factor
        if scale.numel() > 1 and scale.ndim == 2 and scale.shape[1] > 1:
            rows, columns = values.shape
            scale = scale.repeat_interleave(_BLOCK, 0)[:rows]
            scale = scale.repeat_interleave(_BLOCK, 1)[:, :columns]
        elif scale.numel() > 1:
            scale = scale.reshape(-1, *[1] * (values.ndim - 1))
        else:
            scale = scale.reshape(())
        return values.float() * scale

    def _stored(self, name: str) -> str:
        return self._moved.get(name, name)

    def close(self) -> None:
        self._source.close()
