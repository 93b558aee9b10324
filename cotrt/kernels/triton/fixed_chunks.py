"""Attention for deterministic plans: one tile for all groups; a launch to attend, one to merge."""

from __future__ import annotations

from dataclasses import replace

import torch

from cotrt.plan import AttentionPlan

from .attention_kernel import ITEM_FIELDS, LOG2_E
from .attention_variants import Variant, choose_variant, low_tile, programs_per_processor
from .attention_work import AttentionWork
from .chunk_kernel import attend_chunks_kernel, merge_chunks_kernel
from .launch import next_power_of_2, num_processors

# Of the plans; whole steps of any variant's loop.
CHUNK_TOKENS = 256
MERGE_HEADS = 4  # heads a program of the merge takes at a time


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
    num_q_heads, head_dim = q.shape[1:]
    num_kv_heads, block_size = k_cache.shape[1:3]
    variant = fixed_variant(head_dim, work.heads_per_kv, block_size, q.dtype)
    assert work.low_tile == work.high_tile == variant.high_tile
    partial, state = room
    processors = num_processors(q.device)
    programs = processors * programs_per_processor(variant)
    if not replayed:
        programs = min(programs, work.num_items * num_kv_heads)
    attend_chunks_kernel[(programs,)](
        q,
        k_cache,
        v_cache,
        out,
        partial,
        state,
        work.counts,
        work.items,
        work.entries,
        work.slot_rows,
        work.slot_partials,
        work.positions,
        scale * LOG2_E,
        num_kv_heads,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        **attend_chunks_constants(variant, q.dtype),
        num_warps=variant.num_warps,
        num_stages=variant.num_stages,
        enable_fp_fusion=False,
    )
    if replayed or work.num_merge_rows:
        programs = processors * 8
        if not replayed:
            programs = min(programs, work.num_merge_rows * -(-num_q_heads // MERGE_HEADS))
        merge_chunks_kernel[(programs,)](
            partial,
            state,
            out,
            work.counts,
            work.merge_rows,
            work.merge_offsets,
            work.merge_partials,
            num_q_heads,
            out.stride(0),
            out.stride(1),
            **merge_chunks_constants(head_dim),
            num_warps=2,
            enable_fp_fusion=False,
        )


def attend_chunks_constants(variant: Variant, dtype: torch.dtype) -> dict[str, int | str]:
    """The compile-time arguments of the attention kernel."""
    return {
        "FIELDS": ITEM_FIELDS,
        "CHUNK": CHUNK_TOKENS,
        "G": variant.heads_per_kv,
        "BLOCK_G": next_power_of_2(variant.heads_per_kv),
        "D": variant.head_dim,
        "BLOCK_D": next_power_of_2(variant.head_dim),
        "BS": variant.block_size,
        "TILE": variant.high_tile,
        "BLOCK_N": variant.block_n,
        # Exact products for float32 inputs; 16-bit ones are exact in any mode.
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
    }


def merge_chunks_constants(head_dim: int) -> dict[str, int]:
    """The compile-time arguments of the merge kernel."""
    return {"D": head_dim, "BLOCK_D": next_power_of_2(head_dim), "BLOCK_H": MERGE_HEADS}
