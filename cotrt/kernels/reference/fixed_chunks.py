"""Attention for deterministic plans in plain torch: every product has one shape.

Torch's products give a row other bits in another batch. So each group is cut into *cells*, one
chunk of 256 keys for 8 rows, padded, and cells are computed 8 at a time, padded too. A row's chunks
are then added up from root to leaf, 32 rows at a time. Nothing has a shape that hangs on the plan;
that a place inside these shapes makes no difference either is checked by `is_exact`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from cotrt.plan import AttentionPlan

# Rows of a cell, cells of a product, and rows whose chunks are added up together.
CELL_ROWS, CELLS, MERGED_ROWS = 8, 8, 32


@dataclass(slots=True)
class PreparedChunks:
    """Cells of a plan, and where each row's results are among theirs.

    Attributes:
        num_rows: T.
        blocks: int64 ``[C, 256 / block_size]`` of each cell, C a multiple of ``CELLS``; a short
            one repeats its last.
        rows: int64 ``[C, CELL_ROWS]`` rows of q; a small cell repeats its last.
        visible: int64 ``[C, CELL_ROWS]`` keys of the chunk that each row sees, 1 or more.
        length: int64 ``[C]`` keys of each chunk.
        results: int64 ``[T', depth]`` each row's results (cell * CELL_ROWS + place) from root to
            leaf, T' a multiple of ``MERGED_ROWS``.
        counts: int64 ``[T']`` how many of them there are.
    """

    num_rows: int
    blocks: torch.Tensor
    rows: torch.Tensor
    visible: torch.Tensor
    length: torch.Tensor
    results: torch.Tensor
    counts: torch.Tensor


def prepare_chunks(plan: AttentionPlan) -> PreparedChunks:
    """The cells of a deterministic plan."""
    chunk, size = plan.chunk_tokens, plan.block_size
    blocks: list[np.ndarray] = []
    rows: list[np.ndarray] = []
    visible: list[np.ndarray] = []
    lengths: list[int] = []
    mine: list[list[tuple[int, int]]] = [[] for _ in range(plan.num_rows)]
    for group in range(plan.num_groups):
        first, last = plan.group_row_offsets[group : group + 2].tolist()
        start, length = int(plan.group_start[group]), int(plan.group_len[group])
        entry = int(plan.group_block_offsets[group])
        of_group = plan.group_rows[first:last].astype(np.int64)
        for begin in range(0, length, chunk):
            here = min(chunk, length - begin)
            reach = np.full(len(of_group), here)
            if plan.group_causal[group]:
                position = plan.query_positions[of_group].astype(np.int64)
                reach = np.minimum(position - (start + begin) + 1, here)
            seeing, reach = of_group[reach > 0], reach[reach > 0]
            used = np.arange(chunk // size).clip(max=-(-here // size) - 1)
            ids = plan.group_blocks[entry + begin // size + used].astype(np.int64)
            for at in range(0, len(seeing), CELL_ROWS):
                place = np.arange(at, at + CELL_ROWS).clip(max=len(seeing) - 1)
                for i, row in enumerate(seeing[at : at + CELL_ROWS].tolist()):
                    mine[row].append((start + begin, len(rows) * CELL_ROWS + i))
                blocks.append(ids)
                rows.append(seeing[place])
                visible.append(reach[place])
                lengths.append(here)
    spare = -len(rows) % CELLS
    for cells in (blocks, rows, visible):
        cells += cells[-1:] * spare
    lengths += lengths[-1:] * spare
    depth = max(map(len, mine))
    results = np.zeros((-(-plan.num_rows // MERGED_ROWS) * MERGED_ROWS, depth), np.int64)
    counts = np.zeros(len(results), np.int64)
    for row, found in enumerate(mine):
        counts[row] = len(found)
        results[row, : len(found)] = [result for _, result in sorted(found)]
    return PreparedChunks(
        num_rows=plan.num_rows,
        blocks=torch.from_numpy(np.stack(blocks)),
        rows=torch.from_numpy(np.stack(rows)),
        visible=torch.from_numpy(np.stack(visible)),
        length=torch.tensor(lengths),
        results=torch.from_numpy(results),
        counts=torch.from_numpy(counts),
    )


def attend_chunks(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    plan: PreparedChunks,
    scale: float,
) -> torch.Tensor:
    """``tree_attention`` of a deterministic plan: ``[T, num_q_heads, head_dim]``, like ``q``."""
    num_q_heads, head_dim = q.shape[1:]
    num_kv_heads, size = k_cache.shape[1:3]
    length = plan.blocks.shape[1] * size
    heads = num_q_heads // num_kv_heads
    wide = q.float().view(-1, num_kv_heads, heads, head_dim)
    token = torch.arange(length)
    parts = []
    for at in range(0, len(plan.rows), CELLS):
        cells = slice(at, at + CELLS)
        pad = (token >= plan.length[cells, None])[:, None, :, None]
        k, v = (
            cache[plan.blocks[cells]]  # [cells, blocks, heads, tokens, dim]
            .transpose(1, 2)
            .reshape(CELLS, num_kv_heads, length, head_dim)
            .float()
            .masked_fill(pad, 0.0)
            for cache in (k_cache, v_cache)
        )
        rows = wide[plan.rows[cells]]  # [cells, rows, kv heads, heads, dim]
        seen = (token < plan.visible[cells, :, None]).repeat_interleave(heads, dim=1)
        rows = rows.transpose(1, 2).reshape(CELLS, num_kv_heads, -1, head_dim)
        parts.append(_attend_cells(rows, k, v, seen[:, None], scale))
    shape = (len(plan.rows), num_kv_heads, CELL_ROWS, heads)

    def by_row(index: int, *rest: int) -> torch.Tensor:
        values = torch.cat([part[index] for part in parts]).view(*shape, *rest)
        return values.transpose(1, 2).reshape(-1, num_q_heads, *rest)

    out, top, total = by_row(0, head_dim), by_row(1), by_row(2)
    merged = [
        _add_up(out, top, total, plan.results[at : at + MERGED_ROWS], counts)
        for at in range(0, len(plan.results), MERGED_ROWS)
        if (counts := plan.counts[at : at + MERGED_ROWS]).any()
    ]
    return torch.cat(merged)[: plan.num_rows].to(q.dtype)


def _attend_cells(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output (not normalised), largest score and sum of weights of each row of each cell.

    Args:
        q: float32 ``[CELLS, Hkv, M, D]``.
        k: float32 ``[CELLS, Hkv, 256, D]``.
        v: like ``k``.
        seen: bool ``[CELLS, 1, M, 256]``; a row sees 1 key or more.
        scale: of the scores.
    """
    scores = (q @ k.mT * scale).masked_fill_(~seen, -torch.inf)
    top = scores.amax(dim=-1)
    weights = torch.exp_(scores.sub_(top[..., None]))
    return weights @ v, top, weights.sum(dim=-1)


def _add_up(
    out: torch.Tensor,
    top: torch.Tensor,
    total: torch.Tensor,
    results: torch.Tensor,
    counts: torch.Tensor,
) -> torch.Tensor:
    """``[MERGED_ROWS, Hq, D]``: each row's chunks one after the other, then normalised."""
    o, m, s = out[results[:, 0]], top[results[:, 0]], total[results[:, 0]]
    for depth in range(1, int(counts.max())):
        at = results[:, depth]
        now = torch.maximum(m, top[at])
        before, here = torch.exp(m - now), torch.exp(top[at] - now)
        more = (counts > depth)[:, None]
        o = torch.where(more[..., None], o * before[..., None] + out[at] * here[..., None], o)
        s = torch.where(more, s * before + total[at] * here, s)
        m = torch.where(more, now, m)
    return o / s[..., None]


def is_exact(num_q_heads: int, num_kv_heads: int, head_dim: int, chunk_tokens: int) -> bool:
    """Whether a row of a cell has the same bits at every place, here and with these threads."""
    generator = torch.Generator().manual_seed(0)
    rows = CELL_ROWS * (num_q_heads // num_kv_heads)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(CELLS, num_kv_heads, *shape, generator=generator)

    q, k, v = random(rows, head_dim), random(chunk_tokens, head_dim), random(chunk_tokens, head_dim)
    seen = torch.ones(CELLS, 1, rows, chunk_tokens, dtype=torch.bool)
    expected = _attend_cells(q, k, v, seen, 0.2)
    for shift in range(1, max(rows, CELLS, num_kv_heads)):
        moves = (shift % CELLS, shift % num_kv_heads, shift % rows)
        moved = _attend_cells(
            q.roll(moves, (0, 1, 2)),
            k.roll(moves[:2], (0, 1)),
            v.roll(moves[:2], (0, 1)),
            seen,
            0.2,
        )
        if not all(torch.equal(a.roll(moves, (0, 1, 2)), b) for a, b in zip(expected, moved)):
            return False
    return True
