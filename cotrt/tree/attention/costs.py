"""What a plan costs: bytes moved a layer, the constants of a backend, and the roofline time.

The model counts key/value bytes a group reads and, for rows that are in more than one group, the
partial results written once and read once. It knows nothing of caches or of tile padding, so it
gives a direction and a floor, not a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cotrt.plan import AttentionPlan


@dataclass(frozen=True, slots=True)
class PlanCosts:
    """Cost constants of one backend for one model; they decide what is shared.

    Attributes:
        kv_bytes_per_token: K and V bytes of one token in one layer, all KV heads.
        partial_bytes_per_row: bytes that one more group costs a row in one layer: its partial
            output and log-sum-exp, all heads, written and read.
        group_overhead_bytes: what a group costs beside its bytes, as bytes.
        merge_overhead_bytes: what it costs that there is a merge at all (on a GPU, one more
            launch a layer), as bytes. Sharing that gains less gives way to the plain plan.
        max_group_tokens: longer runs are split along KV, for balance; None: never.
        parallel_groups: how many groups keep the device busy; with fewer, runs are split
            further, down to ``min_group_tokens``. 0: never.
        min_group_tokens: no run is split below this for the sake of ``parallel_groups``.
    """

    kv_bytes_per_token: int
    partial_bytes_per_row: int
    group_overhead_bytes: int = 0
    merge_overhead_bytes: int = 0
    max_group_tokens: int | None = None
    parallel_groups: int = 0
    min_group_tokens: int = 256

    def __post_init__(self) -> None:
        assert self.kv_bytes_per_token > 0, "kv_bytes_per_token must be positive"
        assert self.partial_bytes_per_row >= 0, "partial_bytes_per_row must not be negative"
        assert self.group_overhead_bytes >= 0, "group_overhead_bytes must not be negative"
        assert self.merge_overhead_bytes >= 0, "merge_overhead_bytes must not be negative"
        assert self.max_group_tokens is None or self.max_group_tokens > 0, "nothing to split into"
        assert self.min_group_tokens > 0, "min_group_tokens must be positive"

    @classmethod
    def for_heads(
        cls,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        kv_element_bytes: int,
        *,
        group_overhead_tokens: int = 0,
        merge_overhead_bytes: int = 0,
        max_group_tokens: int | None = None,
        parallel_groups: int = 0,
        min_group_tokens: int = 256,
    ) -> PlanCosts:
        """The byte model for a head layout, with fp32 partials.

        32 query and 8 KV heads, d = 128, bf16: a token is 2*8*128*2 = 4,096 bytes, a partial
        32*(128 + 1)*4*2 = 33,024 bytes. A group's overhead is given in tokens of KV.
        """
        kv_bytes = 2 * num_kv_heads * head_dim * kv_element_bytes
        return cls(
            kv_bytes_per_token=kv_bytes,
            partial_bytes_per_row=num_q_heads * (head_dim + 1) * 4 * 2,
            group_overhead_bytes=group_overhead_tokens * kv_bytes,
            merge_overhead_bytes=merge_overhead_bytes,
            max_group_tokens=max_group_tokens,
            parallel_groups=parallel_groups,
            min_group_tokens=min_group_tokens,
        )


def modelled_bytes(plan: AttentionPlan, costs: PlanCosts) -> int:
    """Bytes that one layer's attention moves for ``plan``: KV read, partials written and read."""
    num_partials = int(np.count_nonzero(plan.row_partials >= 0))
    num_tokens = int(plan.group_len.sum(dtype=np.int64))
    return num_tokens * costs.kv_bytes_per_token + num_partials * costs.partial_bytes_per_row


def modelled_cost(plan: AttentionPlan, costs: PlanCosts) -> int:
    """What the planner minimises: :func:`modelled_bytes` and the overheads, as bytes."""
    overhead = plan.num_groups * costs.group_overhead_bytes
    if bool((plan.row_partials >= 0).any()):
        overhead += costs.merge_overhead_bytes
    return modelled_bytes(plan, costs) + overhead


def roofline_us(num_bytes: int, bytes_per_second: float = 4.3e12) -> float:
    """Microseconds to move ``num_bytes``; by default at 4.3 TB/s, about 90% of an H200's HBM3e."""
    return num_bytes / bytes_per_second * 1e6
