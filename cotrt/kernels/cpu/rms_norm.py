"""RMS norm with the residual added first. The decoder stack has its own fused form."""

from __future__ import annotations

from ..reference.rms_norm import rms_norm

__all__ = ["rms_norm"]
