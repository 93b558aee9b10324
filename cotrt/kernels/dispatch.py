"""Chooses the kernels and says why.

A backend is a package beside this file with the functions of `Backend` in files of equal names.
``reference`` is always there; ``cpu`` (native) and ``triton`` each have a module ``support`` with

    refusal(device, dtype, head_dim, block_size) -> str | None

one sentence that says why it cannot serve these, or None where it can.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from ..errors import InvalidRequestError

if TYPE_CHECKING:
    import torch

BACKENDS = ("reference", "cpu", "triton")
# What sharing costs each backend, beside the bytes moved: the planner's constants
# (tree.attention.costs.PlanCosts), a group's overhead in tokens of KV.
_PLAN_COSTS: dict[str, dict[str, int]] = {
    # A group is a gather and a handful of small tensor operations.
    "reference": {"group_overhead_tokens": 16},
    # Long runs are cut so that both cores have work when one branch decodes alone.
    "cpu": {"group_overhead_tokens": 8, "max_group_tokens": 1024, "min_group_tokens": 256},
    # The merge is one more launch a layer, about 4 us of what the memory could have read.
    "triton": {
        "group_overhead_tokens": 16,
        "merge_overhead_bytes": 12_000_000,
        "parallel_groups": 64,
        "min_group_tokens": 256,
    },
}
# Where a backend keeps a function under a file of another name.
_FILES = {
    "gather_blocks": "kv_cache",
    "new_kv_cache": "kv_cache",
    "read_blocks": "kv_cache",
    "scatter_blocks": "kv_cache",
    "write_blocks": "kv_cache",
    "new_graph_plan": "tree_attention",
    "new_sampler": "sample",
    "norm_rotary_write_kv": "write_kv",
    "prepare_plan": "tree_attention",
}


@dataclass(frozen=True)
class Backend:
    """The kernels of one backend, and why it was chosen.

    Attributes:
        name: one of `BACKENDS`.
        why: one sentence for logs and for the user.
        gather_blocks, scatter_blocks: records of blocks on the device; Triton's alone.
        new_graph_plan: makes the plan that CUDA graphs are captured over; Triton's alone.
        new_sampler: makes a sampler that leaves its draws on the device; Triton's alone.
    """

    name: str
    why: str
    new_kv_cache: Callable[..., Any]
    read_blocks: Callable[..., Any]
    write_blocks: Callable[..., Any]
    prepare_plan: Callable[..., Any]
    tree_attention: Callable[..., Any]
    write_kv: Callable[..., Any]
    norm_rotary_write_kv: Callable[..., Any]
    copy_blocks: Callable[..., Any]
    rms_norm: Callable[..., Any]
    rotary: Callable[..., Any]
    silu_and_mul: Callable[..., Any]
    linear: Callable[..., Any]
    gather_blocks: Callable[..., Any] | None = None
    scatter_blocks: Callable[..., Any] | None = None
    new_graph_plan: Callable[..., Any] | None = None
    new_sampler: Callable[..., Any] | None = None


def choose(
    device: str, dtype: torch.dtype, head_dim: int, block_size: int, requested: str = "auto"
) -> Backend:
    """The best backend for a device, dtype and shape.

    Args:
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:1"``.
        dtype: of weights and KV.
        head_dim: elements a head.
        block_size: tokens a block.
        requested: a name of `BACKENDS`, or ``"auto"``.

    Raises:
        InvalidRequestError: an unknown name, or one that cannot serve these.
    """
    if requested not in ("auto", *BACKENDS):
        raise InvalidRequestError(
            f"attention_backend {requested!r} is unknown; one of auto, {', '.join(BACKENDS)}."
        )
    if requested == "reference":
        return _load("reference", "asked for")
    wanted = (
        ("triton" if device.startswith("cuda") else "cpu") if requested == "auto" else requested
    )
    reason = _refusal(wanted, device, dtype, head_dim, block_size)
    if reason is None:
        return _load(wanted, "asked for" if requested != "auto" else f"the fastest on {device}")
    if requested != "auto":
        raise InvalidRequestError(
            f"attention_backend {requested!r} cannot serve this model here: {reason}; use 'auto'."
        )
    return _load("reference", f"plain torch, as the {wanted} kernels cannot serve here: {reason}")


def plan_options(
    backend: str, num_q_heads: int, num_kv_heads: int, head_dim: int, kv_itemsize: int
) -> dict[str, int]:
    """Arguments of the attention planner's ``PlanCosts`` for a backend and a head layout."""
    costs = dict(_PLAN_COSTS[backend])
    token = 2 * num_kv_heads * head_dim * kv_itemsize
    costs["group_overhead_bytes"] = costs.pop("group_overhead_tokens") * token
    # A partial is the float32 output and log-sum-exp of every head, written and read.
    partial = num_q_heads * (head_dim + 1) * 4 * 2
    return {"kv_bytes_per_token": token, "partial_bytes_per_row": partial, **costs}


def _refusal(
    name: str, device: str, dtype: torch.dtype, head_dim: int, block_size: int
) -> str | None:
    package = f"{__package__}.{name}"
    try:
        support = importlib.import_module(f"{package}.support")
    except ModuleNotFoundError as error:
        # Only the backend itself may be absent; what it needs and lacks it says in refusal().
        if error.name not in (package, f"{package}.support"):
            raise
        return "they are not in this installation"
    answer: str | None = support.refusal(device, dtype, head_dim, block_size)
    return answer


def _load(name: str, why: str) -> Backend:
    functions = {}
    for entry in fields(Backend)[2:]:
        if entry.default is None and name != "triton":
            continue
        file = _FILES.get(entry.name, entry.name)
        module = importlib.import_module(f"{__package__}.{name}.{file}")
        functions[entry.name] = getattr(module, entry.name)
    return Backend(name=name, why=why, **functions)
