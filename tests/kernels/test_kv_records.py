"""Records: KV of whole blocks in one plain layout, the same from every backend."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch

from cotrt.kernels.cpu import kv_cache as native
from cotrt.kernels.cpu.native import missing_reason
from cotrt.kernels.cpu.write_kv import write_kv as native_write_kv
from cotrt.kernels.reference import kv_cache as reference
from cotrt.kernels.reference.write_kv import write_kv as reference_write_kv
from cotrt.plan import KVShape
from cotrt.testing import ScriptedModel

LAYERS, BLOCKS, HEADS, DIM = 3, 6, 2, 32
WRITERS = {"reference": (reference, reference_write_kv), "cpu": (native, native_write_kv)}
needs_native = pytest.mark.skipif(missing_reason() is not None, reason=str(missing_reason()))
BACKENDS = ["reference", pytest.param("cpu", marks=needs_native)]


def _filled(
    backend: str, block_size: int, dtype: torch.dtype, k: torch.Tensor, v: torch.Tensor
) -> tuple[ModuleType, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Caches whose slot t holds row t of k and v ``[LAYERS, tokens, HEADS, DIM]``."""
    module, write_kv = WRITERS[backend]
    caches = module.new_kv_cache(LAYERS, BLOCKS, block_size, HEADS, DIM, dtype, "cpu")
    slots = torch.arange(BLOCKS * block_size)
    for layer, (k_cache, v_cache) in enumerate(caches):
        write_kv(k[layer], v[layer], k_cache, v_cache, slots)
    return module, caches


def _rows(block_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = torch.randn(2, LAYERS, BLOCKS * block_size, HEADS, DIM).to(dtype).unbind()
    return k, v


def _expected(
    k: torch.Tensor, v: torch.Tensor, blocks: list[int], block_size: int
) -> list[torch.Tensor]:
    both = torch.stack([k, v], dim=1)  # [layer, kind, token, head, dim]
    return [both[:, :, b * block_size : (b + 1) * block_size].contiguous() for b in blocks]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [8, 16, 32, 256])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_record_is_layer_kind_token_head_dim(
    backend: str, block_size: int, dtype: torch.dtype
) -> None:
    k, v = _rows(block_size, dtype)
    module, caches = _filled(backend, block_size, dtype, k, v)
    blocks = [4, 0, 5]
    records = module.read_blocks(caches, blocks)
    assert records.dtype == np.uint8
    for record, expected in zip(records, _expected(k, v, blocks, block_size), strict=True):
        assert torch.equal(torch.from_numpy(record.copy()).view(dtype), expected.view(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_size", [8, 16, 64])
@pytest.mark.parametrize("target", BACKENDS)
@pytest.mark.parametrize("source", BACKENDS)
def test_what_one_backend_wrote_another_reads(
    source: str, target: str, block_size: int, dtype: torch.dtype
) -> None:
    if dtype == torch.float16 and "cpu" in (source, target):
        pytest.skip("the native backend stores float16 as float32")
    k, v = _rows(block_size, dtype)
    module, caches = _filled(source, block_size, dtype, k, v)
    records = module.read_blocks(caches, [1, 3])
    records.flags.writeable = False  # as bytes from a file are
    other, into = _filled(target, block_size, dtype, torch.zeros_like(k), torch.zeros_like(v))
    before = other.read_blocks(into, range(BLOCKS))
    other.write_blocks(into, [5, 2], records)
    after = other.read_blocks(into, range(BLOCKS))
    assert np.array_equal(after[[5, 2]], records)
    assert np.array_equal(after[[0, 1, 3, 4]], before[[0, 1, 3, 4]])


@pytest.mark.parametrize("backend", BACKENDS)
def test_records_are_cut_and_joined_into_blocks_of_another_size(backend: str) -> None:
    dtype, tokens = torch.bfloat16, BLOCKS * 32
    shape = KVShape(LAYERS, 2, HEADS, DIM, "bfloat16")
    k, v = torch.randn(2, LAYERS, tokens, HEADS, DIM).to(dtype).unbind()
    module, caches = _filled(backend, 32, dtype, k, v)
    (one,) = module.read_blocks(caches, [2])
    assert one.size == 32 * shape.token_bytes
    small = [shape.cut(one, start, start + 8) for start in range(0, 32, 8)]
    assert np.array_equal(shape.join(small), one)
    into = module.new_kv_cache(LAYERS, 4, 8, HEADS, DIM, dtype, "cpu")
    module.write_blocks(into, [3, 1, 0, 2], np.stack(small))
    assert np.array_equal(shape.join(list(module.read_blocks(into, [3, 1, 0, 2]))), one)
    padded = shape.pad(shape.cut(one, 0, 5), 8)
    assert padded.size == 8 * shape.token_bytes
    assert np.array_equal(shape.cut(padded, 0, 5), shape.cut(one, 0, 5))
    assert not shape.cut(padded, 5, 8).any()


def test_a_scripted_models_records_are_its_token_ids() -> None:
    model = ScriptedModel(lambda path: {1: 1.0}, vocab_size=4, eos_token_id=0)
    assert model.kv_shape.token_bytes == model.kv_bytes_per_token
    model.allocate_kv(4, 8)
    ids = np.arange(16, dtype=np.int32).reshape(2, 8)
    model.write_blocks([3, 1], ids.view(np.uint8))
    assert np.array_equal(model.read_blocks([1, 3]).view(np.int32), ids[::-1])
    assert (model.read_blocks([0]).view(np.int32) == -1).all()
