"""Whether this device computes a row alike wherever it stands: run once when a model is loaded.

Shapes and orders do not depend on the batch, by how the kernels are written. That a device's matrix
instructions give a row the same bits at every place of a tile, and the compiler the same sums in
both attention kernels, is looked at here, with the model's own shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from cotrt.plan import AttentionPlan

from .fixed_chunks import CHUNK_TOKENS
from .tree_attention import tree_attention

# More than a tile of any kernel holds, and no multiple of one.
NUM_ROWS = 70
# Two whole chunks and a part of a third.
NUM_TOKENS = 2 * CHUNK_TOKENS + 88


def is_own(function: Callable[[Tensor], Tensor], rows: Tensor) -> bool:
    """Whether each row's result has the same bits alone, among few and in another order.

    Args:
        function: of rows ``[T, ...]`` to rows.
        rows: random.
    """
    count = len(rows)
    whole = function(rows)
    order = torch.arange(count, device=rows.device).roll(count // 3).flip(0)
    return (
        all(torch.equal(function(rows[i : i + 1]), whole[i : i + 1]) for i in (0, 5, count - 1))
        and torch.equal(function(rows[3:10]), whole[3:10])
        and torch.equal(function(rows[order]), whole[order])
    )


def is_attention_own(
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    num_rows: int = NUM_ROWS,
) -> bool:
    """Whether a row's attention has the same bits alone, among others, and merged of its chunks.

    Args:
        num_q_heads: query heads.
        num_kv_heads: heads of the KV.
        head_dim: elements a head.
        block_size: tokens a block.
        dtype: of queries and KV.
        device: where they live.
        num_rows: rows of the batch.
    """
    generator = torch.Generator().manual_seed(0)
    blocks = -(-NUM_TOKENS // block_size)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    k, v = (random(blocks, num_kv_heads, block_size, head_dim) for _ in range(2))
    q = random(num_rows, num_q_heads, head_dim)
    chunks = range(0, NUM_TOKENS, CHUNK_TOKENS)

    def attend(rows: Tensor, starts: Sequence[int]) -> Tensor:
        plan = _plan(len(rows), starts, block_size)
        return tree_attention(rows, k, v, plan, scale=head_dim**-0.5)

    whole = attend(q, [0])
    return (
        all(torch.equal(attend(q[i : i + 1], [0]), whole[i : i + 1]) for i in (0, num_rows - 1))
        and torch.equal(attend(q, chunks), whole)
        and torch.equal(attend(q.flip(0), [0, chunks[-1]]).flip(0), whole)
    )


def _plan(num_rows: int, starts: Sequence[int], block_size: int) -> AttentionPlan:
    """All rows see NUM_TOKENS tokens of blocks 0, 1, ... in groups that begin at ``starts``."""
    begin = np.array(starts, np.int64)
    end = np.append(begin[1:], NUM_TOKENS)
    rows, groups = np.arange(num_rows), np.arange(len(begin))
    merge = groups * num_rows + rows[:, None] if len(begin) > 1 else np.full((num_rows, 1), -1)
    blocks = [np.arange(a // block_size, -(-b // block_size)) for a, b in zip(begin, end)]

    def array(values: object) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
        return np.ascontiguousarray(values, dtype=np.int32)

    return AttentionPlan(
        block_size=block_size,
        query_positions=array(np.full(num_rows, NUM_TOKENS - 1)),
        group_blocks=array(np.concatenate(blocks)),
        group_block_offsets=array(np.cumsum([0, *map(len, blocks)])),
        group_start=array(begin),
        group_len=array(end - begin),
        group_rows=array(np.tile(rows, len(begin))),
        group_row_offsets=array(np.arange(len(begin) + 1) * num_rows),
        group_causal=array(np.zeros(len(begin))),
        row_partials=array(merge.reshape(-1)),
        row_partial_offsets=array(np.arange(num_rows + 1) * merge.shape[1]),
        chunk_tokens=CHUNK_TOKENS,
    )
