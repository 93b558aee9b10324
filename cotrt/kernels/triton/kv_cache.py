"""The KV pool of the Triton backend: head-major blocks, the head dimension contiguous."""

from __future__ import annotations

from ..reference.kv_cache import new_kv_cache, read_blocks, write_blocks

__all__ = ["new_kv_cache", "read_blocks", "write_blocks"]
