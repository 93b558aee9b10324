"""Attention over the tree on the native kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cotrt.plan import AttentionPlan

from .kv_cache import CacheShape
from .native import dtype_of, module


def prepare_plan(plan: AttentionPlan, device: str | torch.device = "cpu") -> Any:
    """The plan as the native kernels hold it: made once a step, used by every layer."""
    return module().AttentionPlan(
        plan.block_size,
        plan.query_positions,
        plan.group_blocks,
        plan.group_block_offsets,
        plan.group_start,
        plan.group_len,
        plan.group_rows,
        plan.group_row_offsets,
        plan.group_causal,
        plan.row_partials,
        plan.row_partial_offsets,
        *((plan.chunk_tokens,) if plan.chunk_tokens else ()),
    )


def tree_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: Any,
    *,
    scale: float,
    out: Tensor | None = None,
) -> Tensor:
    """Attends every row of ``q`` to the groups that the plan names for it.

    Args:
        q: ``[T, num_q_heads, head_dim]`` float32, bfloat16 or float16.
        k_cache: of `new_kv_cache`, never changed.
        v_cache: its partner.
        plan: what `prepare_plan` gave, or a bare AttentionPlan.
        scale: factor of the scores.
        out: where to write, like ``q``; made when missing.

    Returns:
        ``[T, num_q_heads, head_dim]`` in the dtype of ``q``.
    """
    if isinstance(plan, AttentionPlan):
        plan = prepare_plan(plan)
    shape = CacheShape.of(k_cache, v_cache)
    num_rows, num_q_heads, head_dim = q.shape
    assert num_rows == plan.num_rows and head_dim == shape.head_dim, (q.shape, plan.num_rows)
    assert plan.block_size == shape.block_size, (plan.block_size, shape.block_size)
    assert num_q_heads % shape.num_kv_heads == 0, (num_q_heads, shape.num_kv_heads)
    rows = q.to(k_cache.dtype).contiguous()
    direct = out is not None and out.dtype == rows.dtype and out.is_contiguous()
    result = out if out is not None and direct else torch.empty_like(rows)
    if num_rows:
        module().tree_attention(
            plan, dtype_of(rows), rows.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(),
            result.data_ptr(), shape.num_blocks, num_q_heads, shape.num_kv_heads, head_dim, scale,
        )  # fmt: skip
    if out is None:
        return result.to(q.dtype)
    if not direct:
        out.copy_(result)
    return out
