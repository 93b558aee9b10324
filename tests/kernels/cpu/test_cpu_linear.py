"""Packed linears against float64: shapes off the tiles' edges, epilogues, int8, embeddings."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cotrt.kernels.cpu import native
from cotrt.kernels.cpu.linear import PackedWeight
from cotrt.kernels.cpu.silu_and_mul import silu_and_mul

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.int8: 1e-2}


def loosely(exactly: float, as_int16: float) -> float:
    """The tolerance for bfloat16, which AVX2 keeps in 15 bits of the largest; others as it is."""
    return as_int16 if native.isa() == "avx2" else exactly


def made(n: int, k: int, m: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(n, k, generator=generator) / k**0.5
    x = torch.randn(m, k, generator=generator)
    bias = torch.randn(n, generator=generator)
    if dtype != torch.float32:
        weight, x = weight.bfloat16(), x.bfloat16()
    return weight, x, bias


def dequantised(weight: torch.Tensor) -> torch.Tensor:
    scale = weight.float().abs().amax(dim=1, keepdim=True) / 127
    return (torch.round(weight.float() / scale) * scale).double()


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 200),
    k=st.integers(1, 100).map(lambda k: 2 * k),
    m=st.integers(1, 80),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int8]),
    with_bias=st.booleans(),
)
def test_any_shape(n: int, k: int, m: int, dtype: torch.dtype, with_bias: bool) -> None:
    weight, x, bias = made(n, k, m, dtype, n + k + m)
    packed = PackedWeight([weight], dtype=dtype, biases=[bias] if with_bias else None)
    exact = dequantised(weight) if dtype == torch.int8 else weight.double()
    expected = x.double() @ exact.T + (bias.double() if with_bias else 0)
    found = packed(x, torch.float32)
    assert (found - expected).abs().max() < TOLERANCE[dtype] * max(1, expected.abs().max())
    rounded = packed(x)
    assert rounded.dtype == x.dtype and torch.equal(rounded, found.to(x.dtype))
    residual = torch.randn(m, n)
    added = residual.clone()
    packed.add_to(x, added)
    assert torch.allclose(added, residual + found, atol=1e-6)
    row = packed.row(n - 1)
    of_its_largest = 1e-4 * float(exact[n - 1].abs().max())
    tolerance = loosely(1e-6, of_its_largest) if dtype == torch.bfloat16 else 1e-6
    assert (row - exact[n - 1]).abs().max() <= tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("rows", [1, 12, 13, 500])
def test_gate_and_up(dtype: torch.dtype, rows: int) -> None:
    gate, x, gate_bias = made(48, 64, rows, dtype, 0)
    up, _, up_bias = made(48, 64, rows, dtype, 1)
    packed = PackedWeight([gate, up], dtype=dtype, biases=[gate_bias, up_bias], interleave=True)
    exact = [dequantised(w) if dtype == torch.int8 else w.double() for w in (gate, up)]
    g, u = x.double() @ exact[0].T + gate_bias, x.double() @ exact[1].T + up_bias
    expected = torch.nn.functional.silu(g) * u
    found = packed.silu_mul(x)
    assert found.shape == (rows, 48)
    assert (found.double() - expected).abs().max() < 2 * TOLERANCE[dtype] * expected.abs().max()


def test_many_rows_are_cut_into_chunks() -> None:
    weight, x, _ = made(2100, 256, 1700, torch.bfloat16, 0)
    found = PackedWeight([weight], dtype=torch.bfloat16)(x, torch.float32)
    expected = x.float() @ weight.float().T
    assert torch.allclose(found, expected, atol=loosely(1e-4, 2e-3))


def test_sources_are_packed_one_under_the_other_and_cast() -> None:
    parts = [torch.randn(n, 32) for n in (5, 40, 3)]
    x = torch.randn(4, 32)
    packed = PackedWeight(parts, dtype=torch.float32)
    assert torch.allclose(packed(x), x @ torch.cat(parts).T, atol=1e-5)
    half = [p.half() for p in parts]
    packed = PackedWeight(half, dtype=torch.float32)
    assert torch.allclose(packed(x), x @ torch.cat(half).float().T, atol=1e-5)
    packed = PackedWeight(parts, dtype=torch.bfloat16)
    expected = x.bfloat16().float() @ torch.cat(parts).bfloat16().float().T
    assert torch.allclose(packed(x.bfloat16(), torch.float32), expected, atol=loosely(1e-4, 5e-3))


def test_half_precision_values_are_exact() -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    every = every[every.isfinite()]
    every = every[: len(every) // 64 * 64].view(-1, 64)
    packed = PackedWeight([every], dtype=torch.float32)
    assert all(torch.equal(packed.row(i), every[i].float()) for i in range(len(every)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [7, 16, 100])
def test_silu_and_mul(dtype: torch.dtype, width: int) -> None:
    x = (5 * torch.randn(9, 2 * width)).to(dtype)
    gate, up = x.double().chunk(2, dim=1)
    expected = torch.nn.functional.silu(gate) * up
    assert torch.allclose(silu_and_mul(x).double(), expected, rtol=5e-3, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_what_is_not_finite_stays_in_its_row(dtype: torch.dtype) -> None:
    weight, x, _ = made(70, 96, 9, dtype, 0)
    packed = PackedWeight([weight], dtype=dtype)
    clean = packed(x, torch.float32)
    x[2, 5], x[7, 95] = float("nan"), float("inf")
    found = packed(x, torch.float32)
    rest = [i for i in range(9) if i not in (2, 7)]
    assert torch.equal(found[rest], clean[rest])
    assert not found[[2, 7]].isfinite().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("k", [2, 64, 576, 4864, 18944])
def test_sums_of_the_largest_values_do_not_overflow(k: int, dtype: torch.dtype) -> None:
    weight, x = torch.ones(32, k), torch.full((3, k), 3.0)
    weight[1], x[1], x[2] = -1.0, -3.0, 0.0
    found = PackedWeight([weight], dtype=dtype)(x.bfloat16(), torch.float32)
    expected = x.double() @ weight.double().T
    assert torch.allclose(found.double(), expected, rtol=1e-3)


@pytest.mark.parametrize("outlier", [1.0, 30.0, 1000.0])
def test_bfloat16_products_lose_less_than_rows_rounded_to_bfloat16(outlier: float) -> None:
    weight, _, _ = made(96, 576, 1, torch.bfloat16, 0)
    x = torch.randn(50, 576, generator=torch.Generator().manual_seed(1)) ** 3
    x[:, 100] *= outlier
    rounded = x.bfloat16()
    exact = weight.double().T
    found = PackedWeight([weight], dtype=torch.bfloat16)(rounded, torch.float32)
    ours = (found - rounded.double() @ exact).square().mean().sqrt()
    rounding = ((rounded.double() - x.double()) @ exact).square().mean().sqrt()
    assert ours < 0.5 * rounding


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_shows_in_its_output_alone(bad: float) -> None:
    weight, x, _ = made(70, 96, 9, torch.bfloat16, 0)
    clean = PackedWeight([weight], dtype=torch.bfloat16)(x, torch.float32)
    weight[40, 3] = bad
    found = PackedWeight([weight], dtype=torch.bfloat16)(x, torch.float32)
    assert not found[:, 40].isfinite().any()
    rest = [i for i in range(70) if i != 40]
    assert torch.equal(found[:, rest], clean[:, rest])


def test_rows_and_weights_of_zeros_and_of_tiny_values() -> None:
    weight, x, _ = made(40, 128, 5, torch.bfloat16, 0)
    weight[3], weight[4] = 0.0, 1e-38
    x[1], x[2, :64], x[3] = 0.0, 1e-38, 1e-20
    found = PackedWeight([weight], dtype=torch.bfloat16)(x, torch.float32)
    expected = x.double() @ weight.double().T
    assert found.isfinite().all()
    assert (found - expected).abs().amax(1).le(1e-3 * expected.abs().amax(1) + 1e-30).all()
