"""Attention over the tree in plain torch: the definition of right, on any device.

A plan's groups are put into *tiles*: groups of like shape, padded to one, computed by one call.
A tile's K and V are gathered from the pool once for all of its rows (query heads of one KV head
are rows too), made float32 there and nowhere else, and attended to by the CPU's flash op, which
gives a log-sum-exp, or by plain matrix products where that op is missing. The tiles' results lie
one after the other; an index made with the plan then picks, for each row, its partials from root
to leaf, which are merged by log-sum-exp:

    group 0 [rows 0 1 2 3] ─┐ tile 0   results 0..3  ─┐ row 0: results 0, 4
    group 1 [row 0]         ├ tile 1   result  4      ├ row 1: results 1, 5     -> out [T, Hq, D]
    group 2 [row 1]        ─┘          result  5     ─┘ ...
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from cotrt.plan import AttentionPlan

from . import attention_tiles
from .attention_tiles import PreparedPlan, Tile
from .fixed_chunks import PreparedChunks, attend_chunks, prepare_chunks

__all__ = ["PreparedPlan", "prepare_plan", "tree_attention"]

# Plain products hold a tile's scores in memory: rows are taken in chunks of about this many.
MAX_SCORES = 1 << 24

# (q, k, v, mask, diagonal, scale) -> (out, log-sum-exp), all float32; q [A, B, M, D], k and v
# [A, B, L, D], mask broadcast over [A, B, M, L].
Attend = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, bool, float],
    tuple[torch.Tensor, torch.Tensor],
]


def prepare_plan(plan: AttentionPlan, device: str | torch.device) -> PreparedPlan | PreparedChunks:
    """Makes the index tensors of a step.

    Args:
        plan: any valid plan.
        device: where q and the caches live; the CPU for a deterministic plan.
    """
    if not plan.chunk_tokens:
        return attention_tiles.prepare_plan(plan, device)
    assert torch.device(device).type == "cpu", "deterministic plans run on a CPU"
    return prepare_chunks(plan)


def tree_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    plan: AttentionPlan | PreparedPlan | PreparedChunks,
    *,
    scale: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attends every row of ``q`` to the groups that the plan names for it.

    Args:
        q: ``[T, num_q_heads, head_dim]``; float32, bfloat16 or float16.
        k_cache: ``[num_blocks, num_kv_heads, block_size, head_dim]``, never changed.
        v_cache: like ``k_cache``.
        plan: what ``prepare_plan`` gave, or a bare plan that is prepared here.
        scale: factor of the scores, commonly ``head_dim ** -0.5``.
        out: where to write, like ``q``; made when missing.

    Returns:
        ``[T, num_q_heads, head_dim]`` in the dtype of ``q``.
    """
    if isinstance(plan, AttentionPlan):
        plan = prepare_plan(plan, q.device)
    num_q_heads, head_dim = q.shape[1:]
    assert q.shape[0] == plan.num_rows, (q.shape, plan.num_rows)
    if isinstance(plan, PreparedChunks):
        found = attend_chunks(q, k_cache, v_cache, plan, scale)
        return found if out is None else out.copy_(found)
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    results = [_attend_tile(q, k_cache, v_cache, tile, scale) for tile in plan.tiles]
    if plan.num_blind:  # groups that none of their rows sees: weight 0
        shape = (plan.num_blind, num_q_heads)
        nothing = q.new_zeros(*shape, head_dim, dtype=torch.float32)
        results.append((nothing, q.new_full(shape, -torch.inf, dtype=torch.float32)))
    if not results:
        return out
    partials = torch.cat([o for o, _ in results]) if len(results) > 1 else results[0][0]
    if plan.lone_rows is None:
        out.copy_(partials.index_select(0, plan.lone_results))
        return out
    if len(plan.lone_rows):
        lone = partials.index_select(0, plan.lone_results)
        out.index_copy_(0, plan.lone_rows, lone.to(out.dtype))
    if len(plan.merged_rows):
        lse = torch.cat([lse for _, lse in results]) if len(results) > 1 else results[0][1]
        merged = _merge(partials, lse, plan.merged_results, plan.merged_pad)
        out.index_copy_(0, plan.merged_rows, merged.to(out.dtype))
    return out


def _attend_tile(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, tile: Tile, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """One tile's results: float32 ``[N * M, Hq, D]`` and log-sum-exp ``[N * M, Hq]``."""
    num_groups, num_rows = tile.num_groups, tile.num_rows
    num_q_heads, head_dim = q.shape[1:]
    num_kv_heads = k_cache.shape[1]
    heads = num_q_heads // num_kv_heads
    k, v = _gather(k_cache, tile), _gather(v_cache, tile)
    rows = q.index_select(0, tile.rows).float()
    rows = rows.view(num_groups, num_rows, num_kv_heads, heads, head_dim)
    attend = _attend_flash if q.device.type == "cpu" and _has_flash() else _attend_plain
    if num_groups == 1 and (tile.diagonal or (tile.mask is not None and tile.mask.shape[2] > 1)):
        # A mask that differs by row is one for all heads if they are a dimension of their own.
        rows = rows[0].permute(1, 2, 0, 3)
        shape = (num_kv_heads, heads, tile.length, head_dim)
        k, v = k[0].unsqueeze(1).expand(shape), v[0].unsqueeze(1).expand(shape)
        out, lse = attend(rows, k, v, tile.mask, tile.diagonal, scale)
        out, lse = out.permute(2, 0, 1, 3), lse.permute(2, 0, 1)
    else:
        rows = rows.transpose(1, 2).reshape(num_groups, num_kv_heads, -1, head_dim)
        out, lse = attend(rows, k, v, tile.folded_mask(heads), False, scale)
        shape = (num_groups, num_kv_heads, num_rows, heads)
        out = out.reshape(*shape, head_dim).transpose(1, 2)
        lse = lse.reshape(shape).transpose(1, 2)
    out = out.reshape(-1, num_q_heads, head_dim)
    lse = lse.reshape(-1, num_q_heads)
    if tile.blind is not None:
        out, lse = out.index_fill(0, tile.blind, 0.0), lse.index_fill(0, tile.blind, -torch.inf)
    return out, lse


def _gather(cache: torch.Tensor, tile: Tile) -> torch.Tensor:
    """A tile's K or V, float32 ``[N, Hkv, L, D]``, zero in slots that are not its groups'."""
    _, num_kv_heads, block_size, head_dim = cache.shape
    # Indexing (block, head) pairs puts each head's tokens one after the other in a single copy.
    heads = torch.arange(num_kv_heads, device=cache.device)[:, None]
    blocks = tile.blocks.view(tile.num_groups, 1, -1) * num_kv_heads + heads
    runs = cache.view(-1, block_size, head_dim).index_select(0, blocks.flatten())
    gathered = runs.view(tile.num_groups, num_kv_heads, -1, head_dim)[:, :, : tile.length]
    gathered = gathered.float()
    if tile.pad is not None:
        group, slot = tile.pad
        gathered[group, :, slot] = 0.0
    return gathered


def _merge(
    partials: torch.Tensor, lse: torch.Tensor, results: torch.Tensor, pad: torch.Tensor
) -> torch.Tensor:
    """Merges each row's partials, root to leaf: ``[B, depth]`` indices -> ``[B, Hq, D]``."""
    lses = lse[results].masked_fill_(pad[:, :, None], -torch.inf)
    weights = torch.softmax(lses, dim=1)  # [B, depth, Hq]; exactly 0 for what sees nothing
    merged = partials.index_select(0, results[:, 0]) * weights[:, 0, :, None]
    for depth in range(1, results.shape[1]):
        merged.addcmul_(partials.index_select(0, results[:, depth]), weights[:, depth, :, None])
    return merged


def _attend_plain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    diagonal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, length = q.shape[2], k.shape[2]
    if diagonal:
        mask = q.new_full((num_rows, length), -torch.inf).triu_(1)[None, None]
    chunk = max(1, MAX_SCORES // (q.shape[0] * q.shape[1] * length))
    parts = []
    for begin in range(0, num_rows, chunk):
        scores = q[:, :, begin : begin + chunk] @ k.mT * scale
        if mask is not None:
            scores += mask if mask.shape[2] == 1 else mask[:, :, begin : begin + chunk]
        # A row that sees nothing has maximum -inf; 0 in its place makes all its weights 0.
        top = scores.amax(dim=-1, keepdim=True)
        top = torch.where(top == -torch.inf, 0.0, top)
        weights = torch.exp_(scores.sub_(top))
        total = weights.sum(dim=-1, keepdim=True)
        out = weights @ v / total.clamp(min=torch.finfo(torch.float32).tiny)
        parts.append((out, (top + total.log()).squeeze(-1)))
    return torch.cat([out for out, _ in parts], 2), torch.cat([lse for _, lse in parts], 2)


def _attend_flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    diagonal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = op(q, k, v, 0.0, diagonal, attn_mask=mask, scale=scale)
    return out, lse


@cache
def _has_flash() -> bool:
    """Whether this torch's private flash op is there and means what is expected of it."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, 5, 8, generator=generator).unbind()
    mask = torch.zeros(2, 1, 1, 5)
    mask[1, :, :, 3:] = -torch.inf
    for given, diagonal in ((mask, False), (None, True)):
        expected = _attend_plain(q, k, v, given, diagonal, 0.5)
        try:
            found = _attend_flash(q, k, v, given, diagonal, 0.5)
        except (AttributeError, RuntimeError, TypeError, ValueError):
            return False
        if not all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, expected, strict=True)):
            return False
    return True
