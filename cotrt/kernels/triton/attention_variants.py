"""Which compiled variant of the attention kernel serves a shape; the same table is compiled ahead.

A plan's groups hold from one row to thousands. A launch has two tiles: a low one, the smallest
that holds one row's heads, for decoding leaves, and a high one for groups that need more. So a
launch is never slowed by a tile that none of its groups needs, and stays one launch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .launch import next_power_of_2

TILES = (16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class Variant:
    """Everything about a launch that is compiled in.

    Attributes:
        head_dim: elements a head.
        heads_per_kv: query heads of one KV head; they are stacked as rows of a tile.
        block_size: tokens a block.
        low_tile: rows (times heads) of the tile for small groups.
        high_tile: rows of the tile for large ones; ``low_tile`` where there is only one.
        block_n: keys a step of the loop.
        num_warps: warps a program.
        num_stages: steps of the loop whose loads are in flight.
    """

    head_dim: int
    heads_per_kv: int
    block_size: int
    low_tile: int
    high_tile: int
    block_n: int
    num_warps: int
    num_stages: int

    @property
    def name(self) -> str:
        return (
            f"d{self.head_dim} g{self.heads_per_kv} b{self.block_size} "
            f"m{self.low_tile}/{self.high_tile} n{self.block_n} "
            f"w{self.num_warps} s{self.num_stages}"
        )


def low_tile(heads_per_kv: int) -> int:
    """Rows of the tile for a decoding leaf: its heads, at least what a matrix unit takes."""
    tile = max(16, next_power_of_2(heads_per_kv))
    assert tile <= TILES[-1], f"{heads_per_kv} query heads a KV head do not fit a tile"
    return tile


def choose_variant(
    head_dim: int, heads_per_kv: int, block_size: int, high_tile: int, dtype: torch.dtype
) -> Variant:
    """The variant for a shape and a high tile.

    Decoding is a matter of bytes in flight: small steps and few registers, so that four programs
    share a multiprocessor. Larger tiles take what registers there are without a spill.
    """
    row_bytes = next_power_of_2(head_dim) * dtype.itemsize
    num_warps = 8 if high_tile >= 128 or high_tile * row_bytes > 64 * 256 else 4
    step_bytes = 8192 if num_warps == 4 else 16384
    return Variant(
        head_dim=head_dim,
        heads_per_kv=heads_per_kv,
        block_size=block_size,
        low_tile=low_tile(heads_per_kv),
        high_tile=high_tile,
        block_n=min(64, max(16, step_bytes // row_bytes)),
        num_warps=num_warps,
        num_stages=3,
    )


def largest_tile(head_dim: int, dtype: torch.dtype) -> int:
    """The largest high tile whose registers do not spill."""
    if dtype == torch.float32:
        return 16
    return 128 if head_dim <= 128 else 64


def programs_per_processor(variant: Variant) -> int:
    """Programs that a multiprocessor holds at once, by registers."""
    if variant.num_warps > 4:
        return 1
    return 4 if variant.high_tile <= 16 else 2
