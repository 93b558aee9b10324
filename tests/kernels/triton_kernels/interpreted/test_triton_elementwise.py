"""The small Triton kernels against the reference."""

from __future__ import annotations

import pytest
import torch

from cotrt.kernels.reference import copy_blocks as ref_copy_blocks
from cotrt.kernels.reference import rms_norm as ref_rms_norm
from cotrt.kernels.reference import rotary as ref_rotary
from cotrt.kernels.reference import silu_and_mul as ref_silu_and_mul
from cotrt.kernels.reference import write_kv as ref_write_kv
from cotrt.kernels.triton.copy_blocks import copy_blocks
from cotrt.kernels.triton.kv_cache import new_kv_cache
from cotrt.kernels.triton.linear import linear
from cotrt.kernels.triton.rms_norm import rms_norm
from cotrt.kernels.triton.rotary import rotary
from cotrt.kernels.triton.silu_and_mul import silu_and_mul
from cotrt.kernels.triton.write_kv import norm_rotary_write_kv, write_kv

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# One unit in the last place of values up to 8: sums in another order may round the other way.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 3.2e-2, torch.float16: 4e-3}
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])


def random(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).to(device)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype and found.shape == expected.shape
    torch.testing.assert_close(
        found.float(), expected.float(), rtol=0.0, atol=TOLERANCE[found.dtype]
    )


@dtypes
@pytest.mark.parametrize("size", [64, 576, 1000])
def test_rms_norm(size: int, dtype: torch.dtype, device: torch.device):
    x = random(3, size, dtype=dtype, device=device)
    weight = random(size, dtype=dtype, device=device, seed=1)
    close(rms_norm(x, weight, 1e-5), ref_rms_norm.rms_norm(x, weight, 1e-5))


@dtypes
def test_rms_norm_with_residual(dtype: torch.dtype, device: torch.device):
    x, residual = (random(5, 96, dtype=dtype, device=device, seed=s) for s in (0, 1))
    weight = random(96, dtype=dtype, device=device, seed=2)
    y, total = rms_norm(x, weight, 1e-6, residual)
    expected_y, expected_total = ref_rms_norm.rms_norm(x, weight, 1e-6, residual)
    close(y, expected_y)
    assert torch.equal(total, expected_total)


def test_rms_norm_of_heads_in_a_view(device: torch.device):
    x = random(4, 5, 64, dtype=torch.float32, device=device)[:, :3]
    weight = random(64, dtype=torch.float32, device=device)
    close(rms_norm(x, weight, 1e-6), ref_rms_norm.rms_norm(x, weight, 1e-6))


@dtypes
def test_silu_and_mul(dtype: torch.dtype, device: torch.device):
    x = random(3, 2 * 1100, dtype=dtype, device=device) * 4
    close(silu_and_mul(x), ref_silu_and_mul.silu_and_mul(x))


def angles(num_rows: int, half: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.arange(num_rows)[:, None] * 10.0 ** -torch.linspace(0, 3, half)
    return angle.cos().to(device), angle.sin().to(device)


@dtypes
@pytest.mark.parametrize("size", [64, 80, 128])
def test_rotary_of_views(size: int, dtype: torch.dtype, device: torch.device):
    qkv = random(5, 9 + 3 + 3, size, dtype=dtype, device=device)
    q, k = qkv[:, :9], qkv[:, 9:12]
    cos, sin = angles(5, size // 2, device)
    before = qkv.clone()
    found = rotary(q, k, cos, sin)
    for one, other in zip(found, ref_rotary.rotary(q, k, cos, sin), strict=True):
        close(one, other)
    assert torch.equal(qkv, before)


@dtypes
def test_write_kv_skips_rows_without_a_slot(dtype: torch.dtype, device: torch.device):
    qkv = random(6, 4 + 3 + 3, 80, dtype=dtype, device=device)
    k, v = qkv[:, 4:7], qkv[:, 7:]
    slots = torch.tensor([5, -1, 16 * 3 + 15, 0, -1, 16], device=device)
    found, expected = (new_kv_cache(1, 4, 16, 3, 80, dtype, device)[0] for _ in range(2))
    write_kv(k, v, *found, slots)
    ref_write_kv.write_kv(k, v, *expected, slots)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@dtypes
@pytest.mark.parametrize("has_norm", [False, True])
def test_fused_write_equals_its_parts(has_norm: bool, dtype: torch.dtype, device: torch.device):
    qkv = random(6, 9 + 3 + 3, 64, dtype=dtype, device=device)
    q, k, v = qkv[:, :9], qkv[:, 9:12], qkv[:, 12:]
    weights = [random(64, dtype=dtype, device=device, seed=s) for s in (1, 2)] if has_norm else None
    cos, sin = angles(6, 32, device)
    slots = torch.tensor([3, -1, 20, 0, 17, 16], device=device)
    found, expected = (new_kv_cache(1, 2, 16, 3, 64, dtype, device)[0] for _ in range(2))
    q_weight, k_weight = weights or (None, None)
    turned = norm_rotary_write_kv(
        q, k, v, cos, sin, *found, slots, q_weight=q_weight, k_weight=k_weight, eps=1e-6
    )
    if q_weight is not None:
        q = ref_rms_norm.rms_norm(q, q_weight, 1e-6)
        k = ref_rms_norm.rms_norm(k, k_weight, 1e-6)
    expected_q, expected_k = ref_rotary.rotary(q, k, cos, sin)
    ref_write_kv.write_kv(expected_k, v, *expected, slots)
    close(turned, expected_q)
    close(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def test_write_kv_beyond_two_to_the_31_elements(device: torch.device):
    stride = (1 << 31) + 1024
    storage = torch.empty(stride + 16 * 64, dtype=torch.float16, device=device)
    cache = storage.as_strided((2, 1, 16, 64), (stride, 16 * 64, 64, 1))
    k = random(1, 1, 64, dtype=torch.float16, device=device)
    write_kv(k, k, cache, cache, torch.tensor([16 + 7], device=device))
    assert torch.equal(cache[1, 0, 7], k[0, 0])


@dtypes
def test_copy_blocks(dtype: torch.dtype, device: torch.device):
    caches = new_kv_cache(3, 6, 8, 2, 80, dtype, device)
    for layer in caches:
        for seed, cache in enumerate(layer):
            cache.copy_(random(*cache.shape, dtype=dtype, device=device, seed=seed))
    expected = [tuple(cache.clone() for cache in layer) for layer in caches]
    for pairs in (
        [(0, 3), (0, 4), (1, 5)],
        [(2, 1), (1, 0)],
        [],
    ):  # the second reads what it writes
        copy_blocks(caches, pairs)
        ref_copy_blocks.copy_blocks(expected, pairs)
    for layer, other in zip(caches, expected, strict=True):
        for one, two in zip(layer, other, strict=True):
            assert torch.equal(one, two)


def test_linear_is_torchs(device: torch.device):
    x, weight, bias = (
        random(*shape, dtype=torch.float32, device=device) for shape in ((2, 8), (3, 8), (3,))
    )
    assert torch.equal(linear(x, weight, bias), torch.nn.functional.linear(x, weight, bias))
