"""The largest steps, run before the KV pool is sized: what they take of a GPU's memory."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..plan import AttentionPlan, StepPlan
from .deterministic import CHUNK_TOKENS

if TYPE_CHECKING:
    from .decoder import Decoder
    from .graphs import StepGraphs

logger = logging.getLogger("cotrt")

# The sampler copies and changes the logits of its rows: so many more matrices of them.
_SAMPLER_COPIES = 2
# Graphs that are recorded on trial: enough to see what the first takes, and each other one.
_TRIALS = 4


def full_step(num_rows: int, num_logits: int, block_size: int, chunk_tokens: int = 0) -> StepPlan:
    """A step of `num_rows` rows that writes no KV; every row merges two groups over block 0."""
    rows = np.arange(num_rows, dtype=np.int32)
    zeros = np.zeros(num_rows, np.int32)
    attention = AttentionPlan(
        block_size=block_size,
        query_positions=zeros,
        group_blocks=np.zeros(2, np.int32),
        group_block_offsets=np.arange(3, dtype=np.int32),
        group_start=np.zeros(2, np.int32),
        group_len=np.full(2, block_size, np.int32),
        group_rows=np.concatenate((rows, rows)),
        group_row_offsets=np.arange(3, dtype=np.int32) * num_rows,
        group_causal=np.zeros(2, np.int32),
        row_partials=np.stack((rows, rows + num_rows), axis=1).reshape(-1),
        row_partial_offsets=np.arange(num_rows + 1, dtype=np.int32) * 2,
        chunk_tokens=chunk_tokens,
    )
    return StepPlan(
        input_ids=zeros,
        positions=zeros,
        slot_mapping=np.full(num_rows, -1, np.int64),
        copies=(),
        attention=attention,
        logits_rows=rows[:num_logits],
        sample_rows=np.zeros(0, np.int32),
    )


def measure_steps(
    decoder: Decoder, max_num_seqs: int, max_num_batched_tokens: int, block_size: int
) -> int:
    """Run the largest prompt and the largest decode step.

    Returns:
        Bytes at the peak beside what was allocated before, the sampler's copies of logits
        included; 0 on a CPU.
    """
    if decoder.device.type != "cuda":
        return 0
    logits = min(max_num_seqs, max_num_batched_tokens)
    chunk_tokens = CHUNK_TOKENS if decoder.in_chunks else 0
    decode = full_step(logits, logits, block_size, chunk_tokens)
    decoder.run(decode)  # compiles kernels, loads cuBLAS
    torch.cuda.synchronize(decoder.device)
    torch.cuda.reset_peak_memory_stats(decoder.device)
    before = torch.cuda.memory_allocated(decoder.device)
    decoder.run(decode)
    decoder.run(full_step(max_num_batched_tokens, logits, block_size, chunk_tokens))
    torch.cuda.synchronize(decoder.device)
    peak = torch.cuda.max_memory_allocated(decoder.device) - before
    torch.cuda.empty_cache()
    return peak + _SAMPLER_COPIES * logits * decoder.vocab_size * 4


def measure_graphs(graphs: StepGraphs, device: torch.device) -> int:
    """Record some graphs, see what the device has less, and forget them.

    Returns:
        Bytes that all graphs will take: they share one pool, so that the largest pays for the
        rest, and each has something of its own; 0 on a CPU.
    """
    keys = graphs.keys
    free = [_free_bytes(device)]
    for key in keys[:_TRIALS]:
        graphs.capture([key])
        free.append(_free_bytes(device))
    graphs.clear()
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    taken = free[0] - free[-1]
    # The first of each tile fills the pool; what the last ones added, each of the others adds.
    each = max(0, free[-3] - free[-1]) // 2 if len(free) > 3 else 0
    total = taken + each * max(0, len(keys) - _TRIALS)
    logger.info("CUDA graphs: %d, about %.2f GiB", len(keys), total / (1 << 30))
    return total


def _free_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    free, _ = torch.cuda.mem_get_info(device)
    return int(free)
