"""Records of blocks by the Triton kernel: the reference's bytes, there and back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cotrt.kernels.copy_streams import CopyStreams
from cotrt.kernels.reference import kv_cache as reference
from cotrt.kernels.triton import kv_cache as module

LAYERS, BLOCKS = 2, 7


def random_caches(block_size: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device):
    made = module.new_kv_cache(LAYERS, BLOCKS, block_size, heads, dim, dtype, device)
    generator = torch.Generator().manual_seed(dim)
    for layer in made:
        for cache in layer:
            cache.copy_(torch.randn(cache.shape, generator=generator))
    return made


@pytest.mark.parametrize(
    ("block_size", "heads", "dim", "dtype"),
    [
        (8, 1, 64, torch.bfloat16),
        (16, 3, 80, torch.float16),
        (16, 2, 128, torch.float32),
        (32, 8, 96, torch.bfloat16),
    ],
)
def test_records_are_the_references(block_size, heads, dim, dtype, device):
    caches = random_caches(block_size, heads, dim, dtype, device)
    on_host = [(k.cpu(), v.cpu()) for k, v in caches]
    blocks = [5, 0, 3]
    records = module.read_blocks(caches, blocks)
    expected = reference.read_blocks(on_host, blocks)
    assert records.dtype == np.uint8 and np.array_equal(records, expected)
    module.write_blocks(caches, [6, 2, 5], records)
    reference.write_blocks(on_host, [6, 2, 5], expected)
    for pair, other in zip(caches, on_host, strict=True):
        for cache, host in zip(pair, other, strict=True):
            assert torch.equal(cache.cpu(), host)


def test_no_blocks_are_no_records(device):
    caches = random_caches(8, 1, 64, torch.bfloat16, device)
    assert module.read_blocks(caches, []).shape == (0, LAYERS * 2 * 8 * 64 * 2)
    module.write_blocks(caches, [], np.zeros((0, 0), np.uint8))


def test_records_beside_the_steps_are_those_of_the_order_of_the_calls(device):
    """Blocks that are overwritten, loaded and stored again at once, eight turns in flight."""
    caches = random_caches(16, 2, 64, torch.bfloat16, device)
    streams, taken = CopyStreams(device), []
    generator = np.random.default_rng(0)
    for _ in range(8):
        blocks = generator.permutation(BLOCKS)[:3].tolist()
        records = generator.integers(0, 64, (3, LAYERS * 2 * 16 * 2 * 64 * 2), dtype=np.uint8)
        module.scatter_blocks(caches, blocks, streams.to_device(records))
        taken.append((streams.to_host(module.gather_blocks(caches, blocks)), records.copy()))
        for layer in caches:  # what the rows of a step would do
            for cache in layer:
                cache[blocks] = 1.0
    for copy, expected in taken:
        assert np.array_equal(copy.wait(), expected)
        assert copy.seconds >= 0
    assert all((cache[blocks] == 1).all() for layer in caches for cache in layer)
