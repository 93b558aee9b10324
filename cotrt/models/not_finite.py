"""A step run again, with a look at the residual stream between the parts of every layer."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..kernels.not_finite import part_names
from ..plan import StepPlan

if TYPE_CHECKING:
    from .decoder import Decoder


def find_not_finite(decoder: Decoder, step: StepPlan) -> list[str | None]:
    """Which part of `decoder` is the first to give NaN or infinity, by logits row.

    The residual stream is looked at where a norm reads it: the input norm of layer l comes after
    the MLP of layer l - 1, its other norm after its own attention. The step writes the same KV
    once more.

    Returns:
        None for rows whose logits are finite.
    """
    weights, backend = decoder.weights, decoder.backend
    before: dict[int, int] = {}  # a norm's weight: the part whose output it reads
    for index, layer in enumerate(weights.layers):
        before[id(layer.input_norm)] = 2 * index
        before[id(layer.post_norm)] = 2 * index + 1
    before[id(weights.norm)] = 2 * len(weights.layers)
    rows = torch.as_tensor(step.logits_rows).long()
    firsts = torch.full((len(step.input_ids),), -1)

    def rms_norm(x: Tensor, weight: Tensor, eps: float, *residual: Tensor) -> Any:
        part = before.get(id(weight))
        if part is not None:
            stream = x if not residual else x + residual[0]
            bad = ~torch.isfinite(stream).all(-1).cpu()
            if part >= 2 * len(weights.layers) - 1:  # from here on, rows that have logits
                bad = torch.zeros(len(firsts), dtype=torch.bool).index_fill_(0, rows[bad], True)
            firsts[bad & (firsts < 0)] = part
        return backend.rms_norm(x, weight, eps, *residual)

    graphs, decoder.graphs = decoder.graphs, None
    decoder.backend = dataclasses.replace(backend, rms_norm=rms_norm)
    try:
        logits = decoder.run(step)
    finally:
        decoder.backend, decoder.graphs = backend, graphs
    finite = torch.isfinite(logits).all(-1).tolist()
    return part_names(firsts[rows].tolist(), finite, len(weights.layers))
