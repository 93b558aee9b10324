"""Rotary angles: the settings of both config styles, their frequencies, and a table by position.

The arithmetic is float32 in the order that the published checkpoints were trained with, so that
the angles agree to the last bit where the formula is the same.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import ModelLoadError

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger("cotrt")

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "dynamic")
_REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


@dataclass(frozen=True)
class RopeConfig:
    """Rotation settings of one model.

    Attributes:
        rope_type: one of `ROPE_TYPES`.
        theta: base of the frequencies.
        head_dim: rotated dimensions of a head (all of them).
        max_length: tokens that the settings are meant for, scaling considered.
        original_length: tokens of the model before it was stretched (llama3, yarn).
        factor: stretch.
        low_freq_factor, high_freq_factor: llama3.
        beta_fast, beta_slow, truncate: yarn.
        attention_factor: multiplies cos and sin.
        freq_factors: what each frequency is divided by (.gguf files of stretched models), or none.
    """

    rope_type: str
    theta: float
    head_dim: int
    max_length: int
    original_length: int
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    freq_factors: tuple[float, ...] = ()

    @classmethod
    def from_config(cls, config: Mapping[str, Any], head_dim: int, where: str) -> RopeConfig:
        """Settings from ``rope_parameters`` or from ``rope_theta`` with ``rope_scaling``.

        Raises:
            ModelLoadError: an unknown type, a missing or impossible value.
        """
        parameters = config.get("rope_scaling") or config.get("rope_parameters") or {}
        if not isinstance(parameters, Mapping):
            raise ModelLoadError(f"{where}: rope settings must be an object, got {parameters!r}.")
        if any(isinstance(value, Mapping) for value in parameters.values()):
            raise ModelLoadError(f"{where}: rope settings that differ by layer are not supported.")
        # Where both styles are given, theta may stand in the one that was not chosen above.
        newer = config.get("rope_parameters") or {}
        values = {**{k: v for k, v in newer.items() if k == "rope_theta"}, **parameters}
        values.setdefault("rope_theta", config.get("rope_theta", 10_000.0))
        rope_type = values.get("rope_type", values.get("type", "default"))
        if rope_type not in ROPE_TYPES:
            raise ModelLoadError(
                f"{where}: rope type {rope_type!r} is not supported (supported: "
                f"{', '.join(ROPE_TYPES)}); serving it unscaled would be wrong."
            )
        partial = values.get("partial_rotary_factor", config.get("partial_rotary_factor"))
        if partial not in (None, 1, 1.0):
            raise ModelLoadError(
                f"{where}: partial_rotary_factor {partial!r} is not supported; only 1.0 is."
            )

        def number(key: str, default: float | None = None) -> float:
            value = values.get(key)
            value = default if value is None else value
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise ModelLoadError(
                    f"{where}: rope type {rope_type!r} needs a positive {key}, got {value!r}."
                )
            return float(value)

        for key in _REQUIRED[rope_type]:
            number(key)
        maximum = config.get("max_position_embeddings")
        if isinstance(maximum, bool) or not isinstance(maximum, int) or maximum < 1:
            raise ModelLoadError(
                f"{where}: max_position_embeddings must be a positive integer, got {maximum!r}."
            )
        # A value beside the rope settings wins over one inside, as in transformers.
        outer = config.get("original_max_position_embeddings")
        inner = values.get("original_max_position_embeddings")
        original = int(outer or inner or maximum)
        factor = number("factor", 1.0)
        length = maximum
        if rope_type == "yarn":
            length = max(maximum, int(original * factor))
        return cls(
            rope_type=rope_type,
            theta=number("rope_theta"),
            head_dim=head_dim,
            max_length=length,
            original_length=original,
            factor=factor,
            low_freq_factor=number("low_freq_factor", 1.0),
            high_freq_factor=number("high_freq_factor", 1.0),
            beta_fast=number("beta_fast", 32.0),
            beta_slow=number("beta_slow", 1.0),
            truncate=bool(values.get("truncate", True)),
            attention_factor=_attention_factor(rope_type, values, factor),
            freq_factors=tuple(values.get("freq_factors") or ()),
        )

    def inverse_frequencies(self) -> Tensor:
        """``[head_dim / 2]`` float32 angles a position step."""
        import torch

        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        inverse = 1.0 / (self.theta**exponents)
        if self.rope_type == "linear":
            inverse = inverse / self.factor
        elif self.rope_type == "llama3":
            inverse = self._llama3(inverse)
        elif self.rope_type == "yarn":
            inverse = self._yarn(self.theta**exponents)
        if self.freq_factors:
            inverse = inverse / torch.tensor(self.freq_factors, dtype=torch.float32)
        # dynamic equals default up to the original length, and is not served beyond it.
        return inverse

    def _llama3(self, inverse: Tensor) -> Tensor:
        import torch

        low = self.original_length / self.low_freq_factor
        high = self.original_length / self.high_freq_factor
        wavelength = 2 * math.pi / inverse
        stretched = torch.where(wavelength > low, inverse / self.factor, inverse)
        smooth = (self.original_length / wavelength - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        blended = (1 - smooth) * stretched / self.factor + smooth * stretched
        between = (wavelength >= high) & (wavelength <= low)
        return torch.where(between, blended, stretched)

    def _yarn(self, steps: Tensor) -> Tensor:
        import torch

        def dimension(rotations: float) -> float:
            turns = self.original_length / (rotations * 2 * math.pi)
            return (self.head_dim * math.log(turns)) / (2 * math.log(self.theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.head_dim - 1)
        if low == high:
            high += 0.001
        ramp = (torch.arange(self.head_dim // 2, dtype=torch.float32) - low) / (high - low)
        kept = 1 - torch.clamp(ramp, 0, 1)
        return (1.0 / (self.factor * steps)) * (1 - kept) + (1.0 / steps) * kept


def _attention_factor(rope_type: str, values: Mapping[str, Any], factor: float) -> float:
    if rope_type != "yarn":
        return 1.0
    given = values.get("attention_factor")
    if given is not None:
        return float(given)

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    one, all_dims = values.get("mscale"), values.get("mscale_all_dim")
    if one and all_dims:
        return mscale(float(one)) / mscale(float(all_dims))
    return mscale(1.0)


class RotaryTable:
    """cos and sin by position, grown by doubling as longer sequences come.

    A table and not a formula a step: a gather of two rows costs less than their sines.
    """

    def __init__(self, config: RopeConfig, device: str) -> None:
        self._inverse = config.inverse_frequencies()
        self._scale = config.attention_factor
        self._limit = config.max_length
        self._device = device
        self._cos, self._sin = self._angles(min(4096, config.max_length))

    def _angles(self, length: int) -> tuple[Tensor, Tensor]:
        import torch

        angles = torch.arange(length, dtype=torch.float32)[:, None] * self._inverse
        cos, sin = angles.cos() * self._scale, angles.sin() * self._scale
        return cos.to(self._device), sin.to(self._device)

    def reserve(self, length: int) -> None:
        """Make positions below ``length`` available."""
        have = len(self._cos)
        if length > have:
            self._cos, self._sin = self._angles(max(length, min(2 * have, self._limit)))

    def gather(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cos and sin, float32 ``[T, head_dim / 2]``, of reserved int64 ``positions`` ``[T]``."""
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)
