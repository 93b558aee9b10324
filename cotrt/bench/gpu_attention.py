"""Tree attention on published tree shapes, beside attention a query at a time.

The shapes are FastTree's (MLSys 2025): nodes a level, tokens a node. "Roofline" is the time in
which the bytes that the plan moves (KV read, partials written and read) pass at the bandwidth
that was measured in this run.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cotrt.bench.gpu_timing import Timer
from cotrt.kernels.dispatch import choose, plan_options
from cotrt.tree.attention.costs import PlanCosts, modelled_bytes
from cotrt.tree.attention.planner import AttentionPlanner, PlanLeaf

SHAPES: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((1, 10), (4000, 400)),
    ((1, 1024), (2048, 32)),
    ((1, 4, 16, 512), (1024, 256, 128, 32)),
    ((1, 2, 4, 8, 16, 32, 64, 128, 1024), (16,) * 9),
    ((1, 8, 16, 32, 64, 256, 1024), (256, 128, 64, 16, 16, 16, 16)),
)
TOY_SHAPES = (((1, 3), (32, 8)), ((1, 2, 4), (16, 16, 8)))

# KV of peers that know no sharing is gathered for so many bytes of queries at most.
_GATHERED_BYTES = 4 << 30


@dataclass(eq=False)
class Node:
    """A node of the tree, for the planner."""

    parent: Node | None
    blocks: list[int]
    start: int = 0
    end: int = 0

    def path(self) -> list[int]:
        """Blocks from the root to here."""
        return [*(self.parent.path() if self.parent else []), *self.blocks]


@dataclass
class Case:
    """One shape: leaves, their block tables, and the pool."""

    block_size: int
    leaves: list[PlanLeaf] = field(default_factory=list)
    tables: list[list[int]] = field(default_factory=list)
    num_blocks: int = 0
    num_tokens: int = 0  # a path; all are equally long

    @classmethod
    def build(cls, widths: tuple[int, ...], lengths: tuple[int, ...], block_size: int) -> Case:
        """The tree with its nodes' children spread evenly; lengths are whole blocks or leaves."""
        case = cls(block_size)

        def take(tokens: int) -> list[int]:
            count = -(-tokens // block_size)
            case.num_blocks += count
            return list(range(case.num_blocks - count, case.num_blocks))

        level = [Node(None, take(lengths[0]), 0, lengths[0]) for _ in range(widths[0])]
        for width, length in zip(widths[1:-1], lengths[1:-1]):
            above = [level[i * len(level) // width] for i in range(width)]
            level = [Node(node, take(length), node.end, node.end + length) for node in above]
        for index in range(widths[-1]):
            node = level[index * len(level) // widths[-1]]
            blocks = take(lengths[-1])
            case.leaves.append(PlanLeaf(node, blocks, node.end + lengths[-1], 1))
            case.tables.append(node.path() + blocks)
        case.num_tokens = sum(lengths)
        return case


def run(timer: Timer, bandwidth: float, *, toy: bool) -> Iterator[dict[str, Any]]:
    """A record for each shape and number of query heads a KV head."""
    dtype = torch.float32 if toy else torch.bfloat16
    heads, size, block_size = (4, 64, 8) if toy else (32, 128, 16)
    for widths, lengths in TOY_SHAPES if toy else SHAPES:
        case = Case.build(widths, lengths, block_size)
        for heads_per_kv in (1, 4) if toy else (1, 4, 16):
            kv_heads = heads // heads_per_kv
            yield _measure(
                case, timer, bandwidth, heads, kv_heads, size, dtype, f"{widths}/{lengths}"
            )


def _measure(
    case: Case,
    timer: Timer,
    bandwidth: float,
    heads: int,
    kv_heads: int,
    size: int,
    dtype: torch.dtype,
    name: str,
) -> dict[str, Any]:
    device, block_size = timer.device, case.block_size
    backend = choose(str(device), dtype, size, block_size, "triton")
    costs = PlanCosts(**plan_options("triton", heads, kv_heads, size, dtype.itemsize))
    # A partial that costs more than all KV: nothing is shared, each query reads its whole path.
    alone = PlanCosts(costs.kv_bytes_per_token, 1 << 40, parallel_groups=costs.parallel_groups)
    shape = (case.num_blocks, kv_heads, block_size, size)
    k, v = (torch.randn(shape, dtype=dtype, device=device) for _ in range(2))
    q = torch.randn(len(case.leaves), heads, size, dtype=dtype, device=device)
    out, scale = torch.empty_like(q), size**-0.5
    record: dict[str, Any] = {
        "shape": name, "heads": heads, "kv_heads": kv_heads, "queries": len(case.leaves),
    }  # fmt: skip
    for label, chosen in (("tree", costs), ("per_query", alone)):
        plan = AttentionPlanner(block_size, chosen).plan(case.leaves)
        prepared = backend.prepare_plan(plan, device)

        def attend(prepared: Any = prepared) -> None:
            backend.tree_attention(q, k, v, prepared, scale=scale, out=out)

        attend()
        seconds = timer.launched(attend)
        moved = modelled_bytes(plan, costs)
        record[f"{label}_us"] = seconds * 1e6
        record[f"{label}_mb"] = moved / 1e6
        record[f"{label}_of_roofline"] = moved / bandwidth / seconds
        if label == "tree":
            record["max_error"] = _error(case, q, k, v, out, scale)
    record["over_per_query"] = record["per_query_us"] / record["tree_us"]
    for label, peer in (("sdpa", _sdpa), ("flash_attn", _flash_attn), ("flashinfer", _flashinfer)):
        try:
            record[f"{label}_us"] = peer(case, timer, q, k, v, scale) * 1e6
        except ImportError:
            record[f"{label}_us"] = None  # not installed
        except Exception as error:  # a peer's failure is a cell of the table, not the end of ours
            record[f"{label}_us"] = f"{type(error).__name__}: {str(error)[:120]}"
    return record


def _gather(case: Case, k: Tensor, v: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Whole K and V of the first queries: ``[count, kv_heads, tokens, size]``."""
    table = torch.tensor(case.tables[:count], device=k.device)

    def gathered(pool: Tensor) -> Tensor:
        blocks = pool[table]  # [count, blocks, kv_heads, block_size, size]
        flat = blocks.transpose(1, 2).flatten(2, 3)
        return flat[:, :, : case.num_tokens].contiguous()

    return gathered(k), gathered(v)


def _count(case: Case, k: Tensor) -> int:
    """Queries whose gathered KV fits: peers are timed on these, and their time is scaled."""
    each = 2 * case.num_tokens * k.shape[1] * k.shape[3] * k.element_size()
    return max(1, min(len(case.leaves), _GATHERED_BYTES // each))


def _attend_plainly(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    attend = torch.nn.functional.scaled_dot_product_attention
    grouped = q.shape[1] != keys.shape[1]
    return attend(q[:, :, None], keys, values, scale=scale, enable_gqa=grouped)[:, :, 0]


def _error(case: Case, q: Tensor, k: Tensor, v: Tensor, out: Tensor, scale: float) -> float:
    """The largest difference from torch in float32, over some queries from both ends."""
    rows = sorted({*range(4), *range(len(case.leaves) - 4, len(case.leaves))} & set(range(len(q))))
    some = Case(case.block_size, tables=[case.tables[r] for r in rows], num_tokens=case.num_tokens)
    keys, values = _gather(some, k, v, len(rows))
    expected = _attend_plainly(q[rows].float(), keys.float(), values.float(), scale)
    return float((out[rows].float() - expected).abs().max())


def _scaled(case: Case, timer: Timer, count: int, call: Callable[[], Any]) -> float:
    return timer.launched(call, inner=4) * len(case.leaves) / count


def _sdpa(case: Case, timer: Timer, q: Tensor, k: Tensor, v: Tensor, scale: float) -> float:
    count = _count(case, k)
    keys, values = _gather(case, k, v, count)
    return _scaled(case, timer, count, lambda: _attend_plainly(q[:count], keys, values, scale))


def _flash_attn(case: Case, timer: Timer, q: Tensor, k: Tensor, v: Tensor, scale: float) -> float:
    flash_attn_with_kvcache = importlib.import_module("flash_attn").flash_attn_with_kvcache
    count = _count(case, k)
    keys, values = (x.transpose(1, 2).contiguous() for x in _gather(case, k, v, count))
    lengths = torch.full((count,), case.num_tokens, dtype=torch.int32, device=q.device)
    some = q[:count, None]
    return _scaled(
        case, timer, count,
        lambda: flash_attn_with_kvcache(
            some, keys, values, cache_seqlens=lengths, softmax_scale=scale
        ),
    )  # fmt: skip


def _flashinfer(case: Case, timer: Timer, q: Tensor, k: Tensor, v: Tensor, scale: float) -> float:
    """Its paged decode: each query over its own block table, over the pool as it is."""
    flashinfer: Any = importlib.import_module("flashinfer")
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=q.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND")
    lengths = [len(table) for table in case.tables]
    ends = torch.tensor([0, *lengths], dtype=torch.int32, device=q.device).cumsum(0)
    last = case.num_tokens - (lengths[0] - 1) * case.block_size
    wrapper.plan(
        ends.to(torch.int32),
        torch.tensor([b for table in case.tables for b in table], dtype=torch.int32).to(q.device),
        torch.full((len(lengths),), last, dtype=torch.int32, device=q.device),
        q.shape[1],
        k.shape[1],
        q.shape[2],
        case.block_size,
        q_data_type=q.dtype,
        kv_data_type=k.dtype,
        sm_scale=scale,
    )
    # Its own launches may read the host, so it is not recorded in a graph.
    return timer.events(lambda: [wrapper.run(q, (k, v)) for _ in range(10)]) / 10
