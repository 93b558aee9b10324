"""Repetition, presence and frequency penalties and logit biases, on the device, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 256


@triton.jit
def penalties_kernel(
    logits_ptr,  # [P, V] float32, changed in place
    offsets_ptr,  # [P + 1] where the edits of each row begin
    ids_ptr,  # [E] token ids, distinct within a row
    counts_ptr,  # [E] how often generated
    seen_ptr,  # [E] 1 where the repetition penalty counts it
    biases_ptr,  # [E] float32
    repetition_ptr,  # [P] float32
    presence_ptr,  # [P] float32
    frequency_ptr,  # [P] float32
    stride_logits,
    BLOCK: tl.constexpr,
):
    """One row a program; its edits are of distinct tokens, so their order does not matter."""
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * stride_logits
    repetition = tl.load(repetition_ptr + row)
    presence = tl.load(presence_ptr + row)
    frequency = tl.load(frequency_ptr + row)
    end = tl.load(offsets_ptr + row + 1)
    for begin in tl.range(tl.load(offsets_ptr + row), end, BLOCK):
        offs = begin + tl.arange(0, BLOCK)
        mask = offs < end
        ids = tl.load(ids_ptr + offs, mask=mask, other=0)
        count = tl.load(counts_ptr + offs, mask=mask, other=0)
        seen = tl.load(seen_ptr + offs, mask=mask, other=0)
        x = tl.load(logits_ptr + ids, mask=mask, other=0.0)
        x = tl.where(seen != 0, tl.where(x > 0, x / repetition, x * repetition), x)
        x = tl.where(count > 0, x - (presence + frequency * count.to(tl.float32)), x)
        x += tl.load(biases_ptr + offs, mask=mask, other=0.0)
        tl.store(logits_ptr + ids, x, mask=mask)


def apply_penalties(
    logits: Tensor,
    offsets: Tensor,
    ids: Tensor,
    counts: Tensor,
    seen: Tensor,
    biases: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    """Changes row p of the logits at the tokens ``ids[offsets[p] : offsets[p + 1]]``.

    The order is that of `cotrt.sampling.processors`: repetition, then presence and frequency, then
    biases; bans are biases of -inf.

    Args:
        logits: float32 ``[P, V]``, changed in place.
        offsets: int32 ``[P + 1]``.
        ids: int32 ``[E]``, distinct within a row.
        counts: int32 ``[E]`` how often each was generated.
        seen: int32 ``[E]`` 1 where the token stands in the prompt or the output.
        biases: float32 ``[E]``, 0 for none.
        repetition: float32 ``[P]``, 1 for none; presence and frequency likewise, 0 for none.
        presence: see ``repetition``.
        frequency: see ``repetition``.
    """
    assert logits.dtype == torch.float32 and logits.stride(1) == 1
    for tensor in (offsets, ids, counts, seen):
        assert tensor.dtype == torch.int32 and tensor.is_contiguous()
    for tensor in (biases, repetition, presence, frequency):
        assert tensor.dtype == torch.float32 and tensor.is_contiguous()
    if not len(ids):
        return
    penalties_kernel[(len(logits),)](
        logits, offsets, ids, counts, seen, biases, repetition, presence, frequency,
        logits.stride(0), BLOCK=_BLOCK,
    )  # fmt: skip
