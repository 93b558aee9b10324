"""Numbers about the engine: the pool, a branch's KV, the counters. The caller holds the lock."""

from __future__ import annotations

from cotrt.engine.engine import Engine
from cotrt.engine.state import TokenSequence
from cotrt.outputs import BranchKV, MemoryStats


def memory_stats(engine: Engine) -> MemoryStats:
    """The pool between two steps."""
    tree, pool = engine.tree, engine.tree.pool
    size = pool.block_size
    stored = sum(len(node.blocks) for node in tree.nodes() if node.num_live) * size
    owned = {block for node in tree.nodes() if node.num_live for block in node.blocks}
    tails: dict[int, int] = {}
    held = 0
    for seq in engine.scheduler.sequences:
        held += seq.num_computed
        if seq.private_len and seq.private[0] not in owned:
            block = seq.private[0]
            filled = size if pool.sealed[block] else seq.private_len
            tails[block] = max(tails.get(block, 0), filled)
    return MemoryStats(
        total=pool.num_blocks,
        free=pool.num_free,
        in_use=pool.num_in_use,
        cached=pool.num_cached,
        host=0 if engine.records is None else engine.records.num_host,
        disk=0 if engine.records is None else engine.records.num_disk,
        tokens_stored=stored + sum(tails.values()),
        tokens_held=held,
        block_size=size,
    )


def branch_kv(engine: Engine, seq: TokenSequence) -> BranchKV:
    """Where a sequence's KV is now."""
    blocks = engine.tree.blocks_of(seq) if seq in engine.scheduler.sequences else set()
    private = engine.tree.blocks_alone(seq) if blocks else 0
    size = engine.tree.block_size
    return BranchKV(
        num_tokens=seq.length,
        computed_tokens=seq.num_computed if blocks else 0,
        blocks=len(blocks),
        shared_blocks=len(blocks) - private,
        private_blocks=private,
        bytes=len(blocks) * size * engine.model.kv_bytes_per_token,
        location="device" if blocks else _location(engine, seq),
    )


def _location(engine: Engine, seq: TokenSequence) -> str:
    """Where KV lies of a sequence that has none on the device."""
    tiers = engine.tree.tiers
    return (None if tiers is None else tiers.location(seq)) or "none"


def metrics(engine: Engine) -> dict[str, int]:
    """Counters and gauges by name; see `LLM.metrics`."""
    scheduler = engine.scheduler
    counters = scheduler.counters
    counters.count_tokens()
    records, moved = engine.records, engine.moved
    return {
        "prompt_tokens_computed": counters.prompt_tokens_computed,
        "generated_tokens": engine.num_generated,
        "generated_tokens_computed": counters.generated_tokens_computed,
        "prompt_tokens_reused": counters.prompt_tokens_reused,
        "recomputed_tokens": counters.recomputed_tokens,
        "preemptions": counters.preemptions,
        "forks": engine.table.num_forks,
        "copies_on_write": engine.tree.num_copies_on_write,
        "prunes": engine.table.num_prunes,
        "evicted_blocks": engine.tree.num_evicted,
        "running": len(scheduler.running),
        "waiting": len(scheduler.waiting),
        "steps": counters.steps,
        "stored_blocks": moved.stored_blocks,
        "loaded_blocks": moved.loaded_blocks,
        "loaded_tokens": moved.loaded_tokens,
        "failed_loads": moved.failed_loads,
        "host_blocks": 0 if records is None else records.num_host,
        "disk_blocks": 0 if records is None else records.num_disk,
    }
