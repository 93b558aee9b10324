"""Copies whole blocks; a block of the packed layout is one contiguous run, like the reference's."""

from __future__ import annotations

from ..reference.copy_blocks import copy_blocks

__all__ = ["copy_blocks"]
