"""Attention for deterministic plans: one tile for all groups; a launch to attend, one to merge."""

from __future__ import annotations

from dataclasses import replace

import torch

from cotrt.plan import AttentionPlan

from .attention_launch import attend_and_merge, shared_constants
from .attention_variants import Variant, choose_variant, low_tile
from .attention_work import AttentionWork
from .chunk_kernel import attend_chunks_kernel, merge_chunks_kernel

# Of the plans; whole steps of any variant's loop.
CHUNK_TOKENS = 256


def fixed_tile(heads_per_kv: int, head_dim: int, dtype: torch.dtype) -> int:
    """Rows of the tile that serves every group of a deterministic plan.

    A decoding leaf fills little of it and a prompt would like more: 32 where registers allow.
    """
    roomy = dtype != torch.float32 and head_dim <= 128
    return max(low_tile(heads_per_kv), 32 if roomy else 16)


def fixed_variant(head_dim: int, heads_per_kv: int, block_size: int, dtype: torch.dtype) -> Variant:
    """The one variant for a shape: what a plan holds has no say in it."""
    tile = fixed_tile(heads_per_kv, head_dim, dtype)
    variant = choose_variant(head_dim, heads_per_kv, block_size, tile, dtype)
    # A chunk is a loop of its own: longer steps, so that it fills and drains less often.
    block_n = variant.block_n if dtype == torch.float32 else min(64, 2 * variant.block_n)
    assert CHUNK_TOKENS % block_n == 0
    if dtype == torch.float32 and head_dim > 128:  # two outputs of a tile at a time: no spills so
        variant = replace(variant, num_warps=8, num_stages=2)
    return replace(variant, low_tile=tile, block_n=block_n)


def check_chunks(plan: AttentionPlan) -> None:
    """Refuse a plan that is not made of the fixed chunks.

    Raises:
        ValueError: it has other chunks, or a group that begins or ends where none does.
    """
    if plan.chunk_tokens != CHUNK_TOKENS:
        raise ValueError(f"chunk_tokens must be 0 or {CHUNK_TOKENS}, got {plan.chunk_tokens}")
    begins = plan.group_start % CHUNK_TOKENS == 0
    if not (begins & ((plan.group_start == 0) | (plan.group_len <= CHUNK_TOKENS))).all():
        raise ValueError("a group is not made of the fixed chunks")


def attend_chunks(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    work: AttentionWork,
    room: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    scale: float,
    *,
    replayed: bool,
) -> None:
    """``tree_attention`` of a deterministic plan, which checked the shapes.

    Args:
        q: ``[T, num_q_heads, head_dim]``.
        k_cache: ``[num_blocks, num_kv_heads, block_size, head_dim]``.
        v_cache: like ``k_cache``.
        work: the work list, of `fixed_tile` alone.
        room: for partials, float32 ``[P, num_q_heads, head_dim]``, and their largest scores and
            sums ``[P, num_q_heads, 2]``.
        out: like ``q``, written.
        scale: of the scores.
        replayed: launch for any plan that ``work`` may come to hold, not for the one in it.
    """
    variant = fixed_variant(q.shape[2], work.heads_per_kv, k_cache.shape[2], q.dtype)
    assert work.low_tile == work.high_tile == variant.high_tile
    attend_and_merge(
        attend_chunks_kernel, merge_chunks_kernel, q, k_cache, v_cache, work, room, out, scale,
        variant, attend_chunks_constants(variant, q.dtype), replayed=replayed,
        enable_fp_fusion=False,
    )  # fmt: skip


def attend_chunks_constants(variant: Variant, dtype: torch.dtype) -> dict[str, int | str]:
    """The compile-time arguments of the attention kernel."""
    own = {"CHUNK": CHUNK_TOKENS, "TILE": variant.high_tile}
    return {**shared_constants(variant, dtype), **own}
