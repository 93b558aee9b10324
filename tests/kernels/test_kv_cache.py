"""new_kv_cache, write_kv and copy_blocks of the reference backend."""

from __future__ import annotations

import pytest
import torch

from cotrt.kernels.reference.copy_blocks import copy_blocks
from cotrt.kernels.reference.kv_cache import new_kv_cache
from cotrt.kernels.reference.write_kv import write_kv


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_land_in_their_slots_and_nowhere_else(dtype: torch.dtype) -> None:
    ((k_cache, v_cache),) = new_kv_cache(1, 5, 8, 3, 4, dtype, "cpu")
    k, v = torch.randn(4, 3, 4), torch.randn(4, 3, 4)
    slots = [17, 0, 39, 16]
    write_kv(k, v, k_cache, v_cache, torch.tensor(slots))
    for new, cache in ((k, k_cache), (v, v_cache)):
        expected = torch.zeros_like(cache)
        for row, slot in enumerate(slots):
            expected[slot // 8, :, slot % 8] = new[row].to(dtype)
        assert torch.equal(cache, expected)


def test_slot_minus_one_is_skipped() -> None:
    ((k_cache, v_cache),) = new_kv_cache(1, 2, 8, 2, 4, torch.float32, "cpu")
    write_kv(*torch.ones(2, 3, 2, 4), k_cache, v_cache, torch.tensor([-1, 3, -1]))
    assert k_cache.sum() == 8 and (k_cache[0, :, 3] == 1).all()
    write_kv(*torch.ones(2, 1, 2, 4), k_cache, v_cache, torch.tensor([-1]))
    assert v_cache.sum() == 8


def test_rows_of_a_merged_projection_need_not_be_contiguous() -> None:
    ((k_cache, v_cache),) = new_kv_cache(1, 2, 8, 2, 4, torch.float32, "cpu")
    qkv = torch.randn(3, 6, 4)
    write_kv(qkv[:, 2:4], qkv[:, 4:], k_cache, v_cache, torch.tensor([8, 9, 10]))
    assert torch.equal(k_cache[1, :, :3].transpose(0, 1), qkv[:, 2:4])


def test_blocks_are_copied_in_every_layer() -> None:
    caches = new_kv_cache(2, 4, 8, 2, 4, torch.float32, "cpu")
    for pair in caches:
        for cache in pair:
            cache.normal_()
    before = [[cache.clone() for cache in pair] for pair in caches]
    copy_blocks(caches, [(0, 3), (3, 1)])  # 3 is read before it is written
    for pair, old in zip(caches, before, strict=True):
        for cache, was in zip(pair, old, strict=True):
            assert torch.equal(cache, was[[0, 3, 2, 0]])
    copy_blocks(caches, [])


def test_the_pool_is_one_pair_a_layer() -> None:
    caches = new_kv_cache(3, 4, 16, 2, 8, torch.bfloat16, "cpu")
    assert [tuple(c.shape) for pair in caches for c in pair] == [(4, 2, 16, 8)] * 6
    assert all(c.dtype == torch.bfloat16 and not c.any() for pair in caches for c in pair)
