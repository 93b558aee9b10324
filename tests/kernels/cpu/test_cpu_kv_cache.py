"""Packed blocks: what is written is found where the layout says, and nothing else is touched."""

from __future__ import annotations

import pytest
import torch

from cotrt.kernels.cpu.copy_blocks import copy_blocks
from cotrt.kernels.cpu.kv_cache import CacheShape, new_kv_cache
from cotrt.kernels.cpu.write_kv import write_kv


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [8, 16, 64])
def test_every_slot_holds_its_row(dtype: torch.dtype, block_size: int) -> None:
    num_blocks, heads, dim = 3, 2, 32
    ((k_cache, v_cache),) = new_kv_cache(1, num_blocks, block_size, heads, dim, dtype, "cpu")
    k_cache.fill_(torch.nan)
    v_cache.fill_(torch.nan)
    slots = torch.tensor([0, block_size - 1, -1, 2 * block_size + 5, block_size])
    k, v = torch.randn(2, len(slots), heads, dim).to(dtype).unbind()
    write_kv(k, v, k_cache, v_cache, slots)
    # [blocks, heads, runs, steps, lanes, step] -> [blocks, runs, lanes, heads, steps, step]
    keys = k_cache.permute(0, 2, 4, 1, 3, 5).reshape(-1, heads, dim)
    values = v_cache.permute(0, 2, 4, 1, 3).reshape(-1, heads, dim)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert torch.equal(keys[slot], k[row]) and torch.equal(values[slot], v[row])
            keys[slot] = values[slot] = torch.nan
    assert keys.isnan().all() and values.isnan().all()


def test_copy_takes_whole_blocks() -> None:
    caches = new_kv_cache(2, 4, 16, 2, 32, torch.bfloat16, "cpu")
    for k, v in caches:
        k.normal_()
        v.normal_()
    before = [(k.clone(), v.clone()) for k, v in caches]
    copy_blocks(caches, [(0, 2), (1, 0)])
    for (k, v), (old_k, old_v) in zip(caches, before, strict=True):
        for new, old in ((k, old_k), (v, old_v)):
            assert torch.equal(new[2], old[0]) and torch.equal(new[0], old[1])
            assert torch.equal(new[1], old[1]) and torch.equal(new[3], old[3])


def test_shape_is_read_off_the_tensors() -> None:
    ((k, v),) = new_kv_cache(1, 5, 8, 3, 48, torch.float16, "cpu")
    assert k.dtype == v.dtype == torch.float32  # float16 is stored as float32
    assert CacheShape.of(k, v) == CacheShape(5, 3, 8, 48)
