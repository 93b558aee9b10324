"""The two launches of attention, attend and merge, whatever kernels they are made of."""

from __future__ import annotations

from typing import Any

import torch

from .attention_kernel import ITEM_FIELDS, LOG2_E
from .attention_variants import Variant, programs_per_processor
from .attention_work import AttentionWork
from .launch import next_power_of_2, num_processors

MERGE_HEADS = 4  # heads a program of the merge takes at a time


def attend_and_merge(
    attend: Any,
    merge: Any,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    work: AttentionWork,
    room: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    scale: float,
    variant: Variant,
    constants: dict[str, int | str],
    *,
    replayed: bool,
    **options: Any,
) -> None:
    """Attend to a work list, then merge the rows that have partials, if there are any.

    Args:
        attend: the kernel of the first launch; merge: that of the second.
        q: ``[T, num_q_heads, head_dim]``.
        k_cache: ``[num_blocks, num_kv_heads, block_size, head_dim]``.
        v_cache: like ``k_cache``.
        work: the work list.
        room: for partials, and for what the kernels keep beside each.
        out: like ``q``, written.
        scale: of the scores.
        variant: how the first is compiled; constants: its compile-time arguments.
        replayed: launch for any plan that ``work`` may come to hold, not for the one in it.
        options: of both launches.
    """
    num_q_heads, head_dim = q.shape[1:]
    num_kv_heads = k_cache.shape[1]
    partial, beside = room
    processors = num_processors(q.device)
    programs = processors * programs_per_processor(variant)
    if not replayed:
        programs = min(programs, work.num_items * num_kv_heads)
    attend[(programs,)](
        q,
        k_cache,
        v_cache,
        out,
        partial,
        beside,
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
        **constants,
        num_warps=variant.num_warps,
        num_stages=variant.num_stages,
        **options,
    )
    if replayed or work.num_merge_rows:
        programs = processors * 8
        if not replayed:
            programs = min(programs, work.num_merge_rows * -(-num_q_heads // MERGE_HEADS))
        merge[(programs,)](
            partial,
            beside,
            out,
            work.counts,
            work.merge_rows,
            work.merge_offsets,
            work.merge_partials,
            num_q_heads,
            out.stride(0),
            out.stride(1),
            **merge_constants(head_dim),
            num_warps=2,
            **options,
        )


def shared_constants(variant: Variant, dtype: torch.dtype) -> dict[str, int | str]:
    """The compile-time arguments that every attention kernel has."""
    return {
        "FIELDS": ITEM_FIELDS,
        "G": variant.heads_per_kv,
        "BLOCK_G": next_power_of_2(variant.heads_per_kv),
        "D": variant.head_dim,
        "BLOCK_D": next_power_of_2(variant.head_dim),
        "BS": variant.block_size,
        "BLOCK_N": variant.block_n,
        # Exact products for float32 inputs; 16-bit ones are exact in any mode.
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
    }


def merge_constants(head_dim: int) -> dict[str, int]:
    """The compile-time arguments of every merge kernel."""
    return {"D": head_dim, "BLOCK_D": next_power_of_2(head_dim), "BLOCK_H": MERGE_HEADS}
