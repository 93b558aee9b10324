"""How many KV blocks there are, and how long a sequence may be in them."""

from __future__ import annotations

import logging
from typing import Any

import pytest

import cotrt.options.pool_size
from cotrt.errors import InvalidRequestError
from cotrt.options.engine import EngineConfig
from cotrt.options.pool_size import GIB, PoolSize, size_pool

TOKEN = 1000  # bytes of KV a token


def size(model_max_len: int = 1024, token: int = TOKEN, **options: Any) -> PoolSize:
    return size_pool(
        EngineConfig(model="some/model", **options),
        device="cpu",
        kv_bytes_per_token=token,
        model_max_len=model_max_len,
    )


def test_a_given_size_is_cut_to_whole_blocks() -> None:
    made = size(kv_cache_memory_bytes=8 * 16 * TOKEN + 15_999)
    assert (made.num_blocks, made.num_tokens, made.num_bytes) == (8, 128, 128_000)


@pytest.mark.parametrize(
    ("available", "expected"),
    [(100 * GIB, 4 * GIB), (10 * GIB, 4 * GIB), (GIB, GIB * 2 // 5), (None, 4 * GIB)],
)
def test_default_is_the_smaller_of_4_gib_and_40_percent(
    monkeypatch: pytest.MonkeyPatch, available: int | None, expected: int
) -> None:
    monkeypatch.setattr(cotrt.options.pool_size, "available_bytes", lambda: available)
    made = size(token=20_000)
    assert made.num_blocks == expected // (16 * 20_000)


def test_a_toy_model_does_not_get_millions_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cotrt.options.pool_size, "available_bytes", lambda: 100 * GIB)
    assert size(token=8).num_blocks == 1 << 17
    assert size(token=8, kv_cache_memory_bytes=1 << 25).num_blocks == 1 << 18


def test_a_pool_without_a_block_is_refused_with_the_numbers() -> None:
    with pytest.raises(InvalidRequestError, match=r"15,999 bytes.*16,000 bytes.*=16000"):
        size(kv_cache_memory_bytes=15_999)


def test_max_model_len_is_the_models_when_the_pool_holds_it() -> None:
    assert size(model_max_len=128, kv_cache_memory_bytes=128 * TOKEN).max_model_len == 128


def test_max_model_len_is_lowered_to_the_pool_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="cotrt"):
        assert size(kv_cache_memory_bytes=128 * TOKEN).max_model_len == 128
    assert "max_model_len lowered from the model's 1024 to 128 tokens" in caplog.text
    assert "kv_cache_memory_bytes=1024000" in caplog.text


def test_a_given_max_model_len_that_the_pool_cannot_hold_is_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, logger="cotrt"):
        made = size(max_model_len=512, kv_cache_memory_bytes=128 * TOKEN)
    assert made.max_model_len == 512
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "max_model_len=512, but the KV pool holds 128 tokens (8 blocks of 16)" in caplog.text
    assert "kv_cache_memory_bytes=512000" in caplog.text


def test_a_max_model_len_above_the_models_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="max_model_len=1025: the model allows 1024"):
        size(max_model_len=1025)


def test_more_sequences_than_a_step_has_tokens_for_never_run_at_once() -> None:
    assert size(max_num_batched_tokens=64).max_num_seqs == 64
    assert size(max_num_seqs=8).max_num_seqs == 8


@pytest.mark.gpu
def test_a_gpu_pool_leaves_what_utilization_says() -> None:
    import torch

    made = size_pool(
        EngineConfig(model="some/model", gpu_memory_utilization=0.5),
        device="cuda:0",
        kv_bytes_per_token=1 << 18,
        model_max_len=1024,
    )
    assert 0 < made.num_bytes <= torch.cuda.mem_get_info(0)[1] // 2


def gpu_size(monkeypatch: pytest.MonkeyPatch, step_bytes: int, **options: Any) -> PoolSize:
    """The pool of a GPU of 80 GiB with 16 GiB of weights and 1 GiB that torch keeps for later."""
    import torch

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (63 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 17 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 16 * GIB)
    return size_pool(
        EngineConfig(model="some/model", **options),
        device="cuda:0",
        kv_bytes_per_token=128 << 10,
        model_max_len=8192,
        step_bytes=step_bytes,
    )


def test_a_gpu_pool_leaves_room_for_steps_and_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    block = 16 * (128 << 10)
    made = gpu_size(monkeypatch, 3 * GIB, gpu_memory_utilization=0.75)
    assert made.num_bytes == (60 - 16 - 3) * GIB // block * block
    given = gpu_size(monkeypatch, 3 * GIB, kv_cache_memory_bytes=GIB)
    assert given.num_bytes == GIB
    with pytest.raises(InvalidRequestError, match=r"16\.0 GiB are taken already and steps need"):
        gpu_size(monkeypatch, 3 * GIB, gpu_memory_utilization=0.2)


def test_a_pool_beyond_the_machines_memory_is_refused_with_the_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cotrt.options.pool_size, "available_bytes", lambda: 3 * GIB)
    monkeypatch.setattr(cotrt.options.pool_size, "total_bytes", lambda: 8 * GIB)
    for asked in (8 * GIB + 1, 10**11, 10**15):
        numbers = rf"{asked:,} bytes are more than the {8 * GIB:,} .*{3 * GIB:,} of them"
        with pytest.raises(InvalidRequestError, match=numbers):
            size(kv_cache_memory_bytes=asked)
    monkeypatch.setattr(cotrt.options.pool_size, "total_bytes", lambda: None)
    assert size(kv_cache_memory_bytes=10**11).num_blocks == 10**11 // (16 * TOKEN)


def test_a_pool_beyond_what_is_free_now_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cotrt.options.pool_size, "available_bytes", lambda: GIB)
    monkeypatch.setattr(cotrt.options.pool_size, "total_bytes", lambda: 8 * GIB)
    size(kv_cache_memory_bytes=GIB)
    assert "available now" not in caplog.text
    size(kv_cache_memory_bytes=2 * GIB)
    assert f"{2 * GIB}, but {GIB} bytes of memory are available now" in caplog.text
