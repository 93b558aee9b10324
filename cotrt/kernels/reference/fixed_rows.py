"""Row-wise functions in tiles of one fixed shape, for deterministic=True on plain torch.

Torch's products, and near the end of an array even its exponentials, give a row other bits in
another batch. So everything that works on rows is done 32 at a time, padded: only a row's place in
its tile could still make a difference, and `is_exact` looks whether it does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ..dispatch import Backend

ROWS = 32


def in_fixed_rows(backend: Backend) -> Backend:
    """The backend with its row-wise functions in tiles of ``ROWS`` rows."""

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return _in_tiles(lambda tile: (backend.linear(tile, weight, bias),), x)[0]

    def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Any:
        if residual is None:
            return _in_tiles(lambda tile: (backend.rms_norm(tile, weight, eps),), x)[0]
        return _in_tiles(lambda tile, r: backend.rms_norm(tile, weight, eps, r), x, residual)

    def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return _in_tiles(backend.rotary, q, k, cos, sin)

    def silu_and_mul(x: Tensor) -> Tensor:
        return _in_tiles(lambda tile: (backend.silu_and_mul(tile),), x)[0]

    return replace(
        backend, linear=linear, rms_norm=rms_norm, rotary=rotary, silu_and_mul=silu_and_mul
    )


def _in_tiles(function: Callable[..., tuple[Tensor, ...]], *rows: Tensor) -> tuple[Tensor, ...]:
    """``function`` over tiles of tensors ``[T, ...]``; the last is padded with zeros."""
    num_rows = len(rows[0])
    found = []
    for at in range(0, max(num_rows, 1), ROWS):
        tiles = []
        for x in rows:
            part = x[at : at + ROWS]
            # Always a copy, so that every tile has the same strides too.
            tile = x.new_zeros((ROWS, *x.shape[1:]))
            tile[: len(part)] = part
            tiles.append(tile)
        found.append(function(*tiles))
    return tuple(torch.cat(parts)[:num_rows] for parts in zip(*found, strict=True))


def is_exact(function: Callable[..., Any], *rows: Tensor) -> bool:
    """Whether each row of ``[ROWS, ...]`` gives the same bits at every place of a tile.

    Args:
        function: of such tensors, to a tensor or a tuple of them.
        rows: its arguments, random.
    """

    def results(*tiles: Tensor) -> tuple[Tensor, ...]:
        found = function(*tiles)
        return found if isinstance(found, tuple) else (found,)

    expected = results(*rows)
    for shift in range(1, ROWS):
        moved = results(*(x.roll(shift, 0) for x in rows))
        if not all(torch.equal(a.roll(shift, 0), b) for a, b in zip(expected, moved, strict=True)):
            return False
    return True
