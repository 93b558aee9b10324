"""Linears at the edges of matrix tiles, and what only matrix tiles do.

`test_every_instruction_set_passes_these_tests` runs this file with the tiles in software.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cotrt.kernels.cpu import native
from cotrt.kernels.cpu.linear import PackedWeight

MATRIX = native.missing_reason() is None and native.isa().startswith("amx")
on_matrix_tiles = pytest.mark.skipif(not MATRIX, reason="the instruction set has no matrix tiles")


def made(n: int, k: int, m: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(n + k + m)
    weight = torch.randn(n, k, generator=generator).bfloat16()
    return weight, torch.randn(m, k, generator=generator).bfloat16()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("k", [30, 32, 34, 62, 64, 98, 128])
def test_rows_and_outputs_at_the_edges_of_tiles(dtype: torch.dtype, k: int) -> None:
    for n in (8, 32, 40, 64, 72, 96, 200):
        weight, x = made(n, k, 97)
        packed = PackedWeight([weight], dtype=dtype)
        rows = torch.stack([packed.row(i) for i in range(n)]).double()
        expected = x.double() @ rows.T
        # Rows are rounded to int16 where there are no products of bfloat16 pairs.
        exact = dtype == torch.bfloat16 and native.isa() != "avx2"
        tolerance = (1e-5 if exact else 3e-4) * float(expected.abs().max())
        for m in (1, 4, 5, 15, 16, 17, 18, 31, 32, 33, 47, 48, 49, 64, 65, 81, 97):
            found = packed(x[:m], torch.float32)
            assert (found - expected[:m]).abs().max() < tolerance, (n, m)


def test_nothing_is_written_beside_the_rows() -> None:
    weight, x = made(40, 64, 64)
    packed = PackedWeight([weight], dtype=torch.bfloat16)
    for m in (5, 16, 17, 23, 37, 49):
        guarded = torch.full((m + 4, 40), 7.0)
        packed.add_to(x[:m], guarded[2 : m + 2])
        assert guarded[:2].eq(7).all() and guarded[m + 2 :].eq(7).all()


def test_a_nan_in_a_row_stays_there() -> None:
    weight, x = made(64, 98, 40)
    packed = PackedWeight([weight], dtype=torch.bfloat16)
    good = packed(x, torch.float32)
    x[3, 97] = torch.nan
    x[35, 0] = torch.inf
    found = packed(x, torch.float32)
    assert not found[3].isfinite().any() and not found[35].isfinite().any()
    others = [i for i in range(40) if i not in (3, 35)]
    assert torch.equal(found[others], good[others])


@on_matrix_tiles
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_a_row_does_not_depend_on_those_beside_it(dtype: torch.dtype) -> None:
    weight, x = made(160, 226, 300)
    packed = PackedWeight([weight], dtype=dtype)
    alone = packed(x[:5], torch.float32)
    for m in (6, 16, 17, 32, 33, 50, 300):
        assert torch.equal(packed(x[:m], torch.float32)[:5], alone)
    shifted = torch.cat([x[100:137], x[:5]])
    assert torch.equal(packed(shifted, torch.float32)[37:], alone)


def documented(x: torch.Tensor, weight: torch.Tensor) -> np.ndarray:
    """TDPBF16PS by its description: even and odd elements by themselves, 32 elements at a time."""
    a, b = x.float().numpy().astype(np.float64), weight.float().numpy().astype(np.float64)
    total = np.zeros((len(a), len(b)), np.float32)
    for first in range(0, a.shape[1], 32):
        halves = np.zeros((2, *total.shape), np.float32)
        for k in range(first, first + 32):
            # Exact in float64: a product has 16 bits, and these sums stay near it.
            product = np.multiply.outer(a[:, k], b[:, k])
            halves[k % 2] = (halves[k % 2].astype(np.float64) + product).astype(np.float32)
        total = total + (halves[0] + halves[1])
    return total


@on_matrix_tiles
def test_sums_are_those_that_the_instruction_is_documented_to_give() -> None:
    weight, x = made(72, 128, 23)
    found = PackedWeight([weight], dtype=torch.bfloat16)(x, torch.float32)
    assert np.array_equal(found.numpy(), documented(x, weight))


@on_matrix_tiles
def test_denormals_are_zeros() -> None:
    weight = torch.zeros(32, 64).bfloat16()
    weight[:, 0] = 1e-20
    x = torch.zeros(8, 64).bfloat16()
    x[:, 0] = 1e-19  # the product lies below 2^-126
    packed = PackedWeight([weight], dtype=torch.bfloat16)
    assert packed(x, torch.float32).eq(0).all()
    x[:, 0] = 1e-39  # itself denormal
    weight[:, 0] = 1e30
    assert PackedWeight([weight], dtype=torch.bfloat16)(x, torch.float32).eq(0).all()
    assert packed(torch.ones(8, 64).bfloat16(), torch.float32).ne(0).all()
