"""How many KV blocks there are, and how long a sequence may be in them."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

from cotrt.errors import InvalidRequestError
from cotrt.options.engine import EngineConfig
from cotrt.options.host_memory import available_bytes, total_bytes

logger = logging.getLogger(__name__)

GIB = 1 << 30

# The tiers below the pool where nothing was said: host memory beside a GPU, and a prefix cache.
_DEFAULT_HOST_BYTES = 4 * GIB
_DEFAULT_PREFIX_CACHE_BYTES = 4 * GIB

# A pool of default size holds at most this many blocks. Only toy models get there, and each block
# costs the host some bookkeeping.
_MAX_DEFAULT_BLOCKS = 1 << 17


@dataclass(frozen=True)
class PoolSize:
    """How large the KV pool is, and how long a sequence may be in it.

    Attributes:
        num_blocks: KV blocks.
        block_size: tokens a block.
        num_bytes: bytes of the KV tensors.
        max_model_len: tokens a sequence may have, generated ones included.
        max_num_seqs: sequences that run at once: each computes one token a step at least, so
            never more than ``max_num_batched_tokens``.
    """

    num_blocks: int
    block_size: int
    num_bytes: int
    max_model_len: int
    max_num_seqs: int

    @property
    def num_tokens(self) -> int:
        """Tokens that the pool holds when every block is full."""
        return self.num_blocks * self.block_size


def size_pool(
    config: EngineConfig,
    *,
    device: str,
    kv_bytes_per_token: int,
    model_max_len: int,
    step_bytes: int = 0,
) -> PoolSize:
    """Size the KV pool; call it when the weights are on the device.

    Args:
        config: the options.
        device: what ``config.resolve_device()`` gave.
        kv_bytes_per_token: bytes of K and V of one token over all layers.
        model_max_len: the longest sequence that the model itself allows, in tokens.
        step_bytes: what steps and CUDA graphs will take of a GPU beside weights and KV, free now.

    Raises:
        InvalidRequestError: ``max_model_len`` above the model's own, a pool that holds no
            block, or one beyond the memory that this process can ever have.
    """
    assert kv_bytes_per_token > 0
    assert model_max_len > 0
    if config.max_model_len is not None and config.max_model_len > model_max_len:
        raise InvalidRequestError(
            f"max_model_len={config.max_model_len}: the model allows {model_max_len} tokens at "
            "most; lower it, or leave it out"
        )
    block_bytes = config.block_size * kv_bytes_per_token
    if config.kv_cache_memory_bytes is not None:
        budget = config.kv_cache_memory_bytes
        num_blocks = budget // block_bytes
        if device == "cpu":
            _check_host_memory(budget)
    else:
        budget = (
            _cpu_pool_bytes() if device == "cpu" else _gpu_pool_bytes(config, device, step_bytes)
        )
        num_blocks = min(budget // block_bytes, _MAX_DEFAULT_BLOCKS)
    if num_blocks < 1:
        raise InvalidRequestError(
            f"a KV pool of {budget:,} bytes holds no block of {config.block_size} tokens, which "
            f"takes {block_bytes:,} bytes; give kv_cache_memory_bytes={block_bytes} at the very "
            "least, or a smaller block_size or model"
        )
    size = PoolSize(
        num_blocks=num_blocks,
        block_size=config.block_size,
        num_bytes=num_blocks * block_bytes,
        max_model_len=_max_model_len(config, num_blocks, block_bytes, model_max_len),
        max_num_seqs=min(config.max_num_seqs, config.max_num_batched_tokens),
    )
    logger.info(
        "KV pool: %d blocks of %d tokens, %.2f GiB; max_model_len %d",
        size.num_blocks,
        size.block_size,
        size.num_bytes / GIB,
        size.max_model_len,
    )
    return size


def _max_model_len(
    config: EngineConfig, num_blocks: int, block_bytes: int, model_max_len: int
) -> int:
    pool_tokens = num_blocks * config.block_size
    wanted = config.max_model_len or model_max_len
    if wanted <= pool_tokens:
        return wanted
    needed = math.ceil(wanted / config.block_size) * block_bytes
    if config.max_model_len is None:
        logger.info(
            "max_model_len lowered from the model's %d to %d tokens, which is what a KV pool of "
            "%d blocks of %d holds; kv_cache_memory_bytes=%d would hold all",
            model_max_len,
            pool_tokens,
            num_blocks,
            config.block_size,
            needed,
        )
        return pool_tokens
    logger.warning(
        "max_model_len=%d, but the KV pool holds %d tokens (%d blocks of %d): longer sequences "
        "will be refused or end with finish_reason 'length'; kv_cache_memory_bytes=%d would hold "
        "one",
        wanted,
        pool_tokens,
        num_blocks,
        config.block_size,
        needed,
    )
    return wanted


def _check_host_memory(asked: int) -> None:
    """Refuse a pool that memory can never hold; warn of one that it cannot hold now."""
    total, available = total_bytes(), available_bytes()
    if total is not None and asked > total:
        now = "" if available is None else f", {available:,} of them free now"
        raise InvalidRequestError(
            f"kv_cache_memory_bytes={asked}: {asked:,} bytes are more than the {total:,} bytes of "
            f"memory that this process can have (the machine's, or its cgroup's limit){now}; "
            "lower it, or leave it out"
        )
    if available is not None and asked > available:
        logger.warning(
            "kv_cache_memory_bytes=%d, but %d bytes of memory are available now: the pool is "
            "taken as it fills, and the system may end this process before it is full",
            asked,
            available,
        )


def _cpu_pool_bytes() -> int:
    """The smaller of 4 GiB and 40% of what the process may still take; touched as it fills."""
    available = available_bytes()
    return 4 * GIB if available is None else min(4 * GIB, available * 2 // 5)


def _gpu_pool_bytes(config: EngineConfig, device: str, step_bytes: int) -> int:
    """What ``gpu_memory_utilization`` leaves beside all that is on the GPU now and steps take."""
    import torch

    free, total = torch.cuda.mem_get_info(device)
    reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    taken = total - free - reusable + step_bytes
    budget = int(total * config.gpu_memory_utilization) - taken
    if budget <= 0:
        raise InvalidRequestError(
            f"gpu_memory_utilization={config.gpu_memory_utilization}: of {total / GIB:.1f} GiB on "
            f"{device}, {(taken - step_bytes) / GIB:.1f} GiB are taken already and steps need "
            f"{step_bytes / GIB:.1f} GiB, so nothing is left for the KV pool; raise it, lower "
            "max_num_batched_tokens or max_num_seqs, free the GPU, or give kv_cache_memory_bytes"
        )
    return budget


def host_tier_bytes(config: EngineConfig) -> int:
    """Bytes of host memory for KV that leaves a device.

    What was asked for; or 4 GiB, or a fifth of the memory that is free where that is less.
    """
    if config.swap_space is not None:
        return int(config.swap_space * GIB)
    available = available_bytes()
    return _DEFAULT_HOST_BYTES if available is None else min(_DEFAULT_HOST_BYTES, available // 5)


def disk_tier_bytes(config: EngineConfig) -> int:
    """Bytes of disk for KV that leaves memory; 0 for none."""
    asked = int(config.disk_space * GIB)
    return asked or (_DEFAULT_PREFIX_CACHE_BYTES if config.prefix_cache_dir is not None else 0)
