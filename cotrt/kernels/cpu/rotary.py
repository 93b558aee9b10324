"""Rotary embedding. One by one it is torch's; the decoder stack fuses its own with the KV write."""

from __future__ import annotations

from ..reference.rotary import rotary

__all__ = ["rotary"]
