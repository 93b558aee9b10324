"""Attention over the tree: one launch over the plan's work list, one for the ordered merge."""

from __future__ import annotations

import torch

from cotrt.plan import AttentionPlan

from .attention_kernel import attend_kernel, merge_kernel
from .attention_launch import attend_and_merge, shared_constants
from .attention_variants import Variant, choose_variant, largest_tile, low_tile
from .attention_work import AttentionWork, Capacity, capacity_for, choose_high_tile
from .fixed_chunks import attend_chunks, check_chunks, fixed_tile

__all__ = ["GraphPlan", "PreparedPlan", "new_graph_plan", "prepare_plan", "tree_attention"]


class PreparedPlan:
    """A plan on its way to a device; the work list is made at the first layer, for its heads.

    Args:
        plan: the plan of a step.
        device: where the step runs.

    Raises:
        ValueError: a deterministic plan that is not made of the fixed chunks.
    """

    def __init__(self, plan: AttentionPlan, device: torch.device) -> None:
        self.plan = plan
        self.device = device
        self.in_chunks = bool(plan.chunk_tokens)
        if self.in_chunks:
            check_chunks(plan)
        self._work: AttentionWork | None = None
        self._partials: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def num_rows(self) -> int:
        """Rows of the step."""
        return self.plan.num_rows

    def work(self, heads_per_kv: int, largest_tile: int) -> AttentionWork:
        """The work list for this many query heads a KV head, with tiles up to the largest.

        In a deterministic plan the largest is the only one.
        """
        if self._work is None or self._work.heads_per_kv != heads_per_kv:
            one, tile = self.in_chunks, largest_tile
            if not one:
                tile = choose_high_tile(self.plan, heads_per_kv, largest_tile)
            capacity = capacity_for(self.plan, heads_per_kv, tile, tile if one else None)
            self._work = AttentionWork(capacity, heads_per_kv, tile, self.device, one_tile=one)
            self._work.write(self.plan)
        return self._work

    def partials(self, num_q_heads: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for partial results and what belongs to each, the same for every layer.

        That is their log-sum-exp, or in a deterministic plan their largest score and sum.
        """
        assert self._work is not None
        return self._room(self._work.num_partials, num_q_heads, head_dim)

    def _room(
        self, num_partials: int, num_q_heads: int, head_dim: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._partials is None or self._partials[0].shape[1:] != (num_q_heads, head_dim):
            shape = (max(num_partials, 1), num_q_heads)
            beside = (*shape, 2) if self.in_chunks else shape
            self._partials = (
                torch.empty(*shape, head_dim, dtype=torch.float32, device=self.device),
                torch.empty(beside, dtype=torch.float32, device=self.device),
            )
        return self._partials


class GraphPlan(PreparedPlan):
    """A plan whose buffers stay where they are: capture a CUDA graph over it, then ``write``.

    Both launches are always made, with grids that depend on the device only, and read their
    counts from the device; so a captured graph replays any plan that fits, with the tile that it
    was captured with.

    Args:
        work: the work list, of the largest capacity that a replay may need.
        tiles: high tiles that graphs are captured with, ascending; default: that of ``work``.
        in_chunks: all plans are deterministic ones; ``work`` and ``tiles`` have one tile.
    """

    def __init__(
        self, work: AttentionWork, tiles: tuple[int, ...] = (), *, in_chunks: bool = False
    ) -> None:
        self.device = work.counts.device
        self.in_chunks = in_chunks
        self.tiles = tiles or (work.high_tile,)
        self._work: AttentionWork = work
        self._partials = None

    @property
    def num_rows(self) -> int:
        """Rows of the plan that was written last."""
        return self._work.num_rows

    def tile_for(self, plan: AttentionPlan) -> int | None:
        """The tile of the graphs that can replay ``plan``; None where it is beyond the capacity."""
        heads = self._work.heads_per_kv
        low = None
        if self.in_chunks:
            low = tile = self.tiles[0]
        else:
            wanted = choose_high_tile(plan, heads, self.tiles[-1])
            tile = next(tile for tile in self.tiles if tile >= wanted)
        fits = self._work.capacity.can_hold(capacity_for(plan, heads, tile, low))
        return tile if fits else None

    def set_tile(self, tile: int) -> None:
        """Choose the tile of what is captured, or written, next."""
        assert tile in self.tiles, (tile, self.tiles)
        self._work.high_tile = tile

    def write(self, plan: AttentionPlan, tile: int | None = None) -> None:
        """Put ``plan`` in place of the last one, in the order of the current stream.

        Raises:
            ValueError: a deterministic plan that is not made of the fixed chunks.
        """
        assert bool(plan.chunk_tokens) == self.in_chunks, (plan.chunk_tokens, self.in_chunks)
        if self.in_chunks:
            check_chunks(plan)
        if tile is not None:
            self.set_tile(tile)
        self._work.write(plan)

    def work(self, heads_per_kv: int, largest_tile: int) -> AttentionWork:
        """The work list; its heads were fixed when it was made."""
        assert self._work.heads_per_kv == heads_per_kv
        assert self._work.high_tile <= largest_tile, (self._work.high_tile, largest_tile)
        return self._work

    def partials(self, num_q_heads: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for as many partials as the work list can have slots."""
        return self._room(self._work.capacity.slots, num_q_heads, head_dim)


def new_graph_plan(
    max_rows: int,
    max_entries: int,
    heads_per_kv: int,
    head_dim: int,
    dtype: torch.dtype,
    device: str | torch.device,
    *,
    in_chunks: bool = False,
) -> GraphPlan:
    """A plan of fixed capacity for decode steps; what does not fit it is run eagerly.

    Args:
        max_rows: rows of the largest step.
        max_entries: block ids of the longest plan that is worth a graph.
        heads_per_kv: query heads of one KV head.
        head_dim: elements a head.
        dtype: of queries and KV.
        device: where it lives.
        in_chunks: for deterministic plans, and for these only.
    """
    # A row is in some groups for each level of its tree; a lone one in many, its context cut.
    slots = max(1024, 8 * max_rows)
    capacity = Capacity.holding(max_rows, slots, slots, max_entries)
    if in_chunks:
        tile = fixed_tile(heads_per_kv, head_dim, dtype)
        work = AttentionWork(capacity, heads_per_kv, tile, torch.device(device), one_tile=True)
        return GraphPlan(work, in_chunks=True)
    low, largest = low_tile(heads_per_kv), min(64, largest_tile(head_dim, dtype))
    tiles = (low, largest) if largest > low else (low,)
    return GraphPlan(AttentionWork(capacity, heads_per_kv, low, torch.device(device)), tiles)


def prepare_plan(plan: AttentionPlan, device: str | torch.device) -> PreparedPlan:
    """What ``tree_attention`` takes in every layer of a step."""
    return PreparedPlan(plan, torch.device(device))


def tree_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    plan: AttentionPlan | PreparedPlan,
    *,
    scale: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attends every row of ``q`` to the groups that the plan names for it.

    Args:
        q: ``[T, num_q_heads, head_dim]``; float32, bfloat16 or float16.
        k_cache: ``[num_blocks, num_kv_heads, block_size, head_dim]``, never changed.
        v_cache: like ``k_cache``.
        plan: what ``prepare_plan`` gave, a `GraphPlan`, or a bare plan that is prepared here.
        scale: factor of the scores, commonly ``head_dim ** -0.5``.
        out: where to write, like ``q``; made when missing.

    Returns:
        ``[T, num_q_heads, head_dim]`` in the dtype of ``q``.
    """
    if isinstance(plan, AttentionPlan):
        plan = prepare_plan(plan, q.device)
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    _, num_q_heads, head_dim = q.shape
    _, num_kv_heads, block_size, _ = k_cache.shape
    is_graph = isinstance(plan, GraphPlan)
    assert is_graph or len(q) == plan.num_rows, (q.shape, plan.num_rows)
    assert num_q_heads % num_kv_heads == 0, (num_q_heads, num_kv_heads)
    assert k_cache.shape == v_cache.shape and k_cache.stride() == v_cache.stride()
    assert q.dtype == k_cache.dtype == v_cache.dtype, (q.dtype, k_cache.dtype, v_cache.dtype)
    assert q.stride(-1) == k_cache.stride(-1) == out.stride(-1) == 1, "D is contiguous"
    heads_per_kv = num_q_heads // num_kv_heads
    largest = largest_tile(head_dim, q.dtype)
    if plan.in_chunks:
        largest = fixed_tile(heads_per_kv, head_dim, q.dtype)
    work = plan.work(heads_per_kv, largest)
    if not is_graph and not work.num_items:
        return out
    partial, lse = plan.partials(num_q_heads, head_dim)
    # Offsets into rows and partials are int32 in the kernels; those into the pool are int64.
    assert max(q.stride(0), out.stride(0)) * len(q) < 1 << 31, "too many rows for one step"
    assert partial.numel() < 1 << 31, "too many partials for one step"
    if plan.in_chunks:
        attend_chunks(q, k_cache, v_cache, work, (partial, lse), out, scale, replayed=is_graph)
        return out
    variant = choose_variant(head_dim, heads_per_kv, block_size, work.high_tile, q.dtype)
    constants = attend_constants(variant, q.dtype)
    attend_and_merge(
        attend_kernel, merge_kernel, q, k_cache, v_cache, work, (partial, lse), out, scale,
        variant, constants, replayed=is_graph,
    )  # fmt: skip
    return out


def attend_constants(variant: Variant, dtype: torch.dtype) -> dict[str, int | str]:
    """The compile-time arguments of the attention kernel."""
    tiles = {"LOW": variant.low_tile, "HIGH": variant.high_tile}
    return {**shared_constants(variant, dtype), **tiles}
