"""Repetition, presence and frequency penalties and logit biases, on the device, in one launch.

`Penalties` keeps the counts there from draw to draw, so that a step need not know on the host what
the one before it drew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..cuda import to_device

_BLOCK = 256
# Draws that a row has room for at first, beside the tokens that it has seen.
_ROOM = 64


@triton.jit
def penalties_kernel(
    logits_ptr,  # [P, V] float32, changed in place
    starts_ptr,  # [P] where the edits of each row begin
    ends_ptr,  # [P] and where they end
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
    """One row a program; its edits are of distinct tokens, so their order does not matter.

    Quotients are rounded and nothing is fused, as in torch: which of the two changes a row's logits
    depends on what others in the batch ask for.
    """
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * stride_logits
    repetition = tl.load(repetition_ptr + row)
    presence = tl.load(presence_ptr + row)
    frequency = tl.load(frequency_ptr + row)
    end = tl.load(ends_ptr + row)
    for begin in tl.range(tl.load(starts_ptr + row), end, BLOCK):
        offs = begin + tl.arange(0, BLOCK)
        mask = offs < end
        ids = tl.load(ids_ptr + offs, mask=mask, other=0)
        count = tl.load(counts_ptr + offs, mask=mask, other=0)
        seen = tl.load(seen_ptr + offs, mask=mask, other=0)
        x = tl.load(logits_ptr + ids, mask=mask, other=0.0)
        x = tl.where(seen != 0, tl.where(x > 0, tl.div_rn(x, repetition), x * repetition), x)
        x = tl.where(count > 0, x - (presence + frequency * count.to(tl.float32)), x)
        x += tl.load(biases_ptr + offs, mask=mask, other=0.0)
        tl.store(logits_ptr + ids, x, mask=mask)


@triton.jit
def count_kernel(
    drawn_ptr,  # [P] token ids, -1: none
    starts_ptr,  # [P]
    ends_ptr,  # [P] changed in place
    ids_ptr,  # [E] changed in place, as are counts, seen and biases
    counts_ptr,
    seen_ptr,
    biases_ptr,
    BLOCK: tl.constexpr,
):
    """One row a program: the drawn token is found among its edits, or becomes a new one."""
    row = tl.program_id(0)
    token = tl.load(drawn_ptr + row)
    start = tl.load(starts_ptr + row)
    end = tl.load(ends_ptr + row)
    if token >= 0:
        found = tl.full([], -1, tl.int32)
        for begin in tl.range(start, end, BLOCK):
            offs = begin + tl.arange(0, BLOCK)
            ids = tl.load(ids_ptr + offs, mask=offs < end, other=-1)
            found = tl.maximum(found, tl.max(tl.where(ids == token, offs, -1), 0))
        is_new = found < 0
        at = tl.where(is_new, end, found)
        count = tl.load(counts_ptr + at, mask=found >= 0, other=0)
        tl.store(counts_ptr + at, count + 1)
        tl.store(seen_ptr + at, 1)
        tl.store(ids_ptr + at, token, mask=is_new)
        tl.store(biases_ptr + at, 0.0, mask=is_new)
        tl.store(ends_ptr + row, end + 1, mask=is_new)


class Edits(Protocol):
    """What changes one draw's logits: `cotrt.sampling.processors.LogitsProcessor` has it."""

    def edits(
        self,
    ) -> tuple[
        npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.float32]
    ]:
        """Distinct token ids; how often each was generated; 1 where seen; biases."""

    def penalties(self) -> tuple[float, float, float]:
        """Repetition, presence and frequency."""


class Penalties:
    """The edits of a batch's draws on the device, brought up to date by what is drawn.

    Args:
        edits: one a draw, or None; read now and never again.
        device: of the logits.
    """

    def __init__(self, edits: Sequence[Edits | None], device: torch.device) -> None:
        lists = [None if each is None else each.edits() for each in edits]
        lengths = np.array([0 if each is None else len(each[0]) for each in lists], np.int32)
        count = len(lists)
        self._width = int(lengths.max(initial=0)) + _ROOM
        self._room = _ROOM  # draws that surely fit
        self._device = device
        table = np.zeros((4, count, self._width), np.int32)
        rows = np.zeros((3, count), np.float32)
        rows[0] = 1.0
        for i, (each, made) in enumerate(zip(edits, lists, strict=True)):
            if each is None or made is None:
                continue
            rows[:, i] = each.penalties()
            for place, values in enumerate(made[:3]):
                table[place, i, : len(values)] = values
            table[3, i, : len(made[3])] = made[3].view(np.int32)
        self._rows = to_device(torch.from_numpy(rows), device)
        self._lay_out(
            to_device(torch.from_numpy(table), device), to_device(torch.from_numpy(lengths), device)
        )

    def _lay_out(self, table: Tensor, lengths: Tensor) -> None:
        self._table = table
        starts = np.arange(table.shape[1], dtype=np.int32) * self._width
        self._starts = to_device(torch.from_numpy(starts), self._device)
        self._ends = self._starts + lengths

    def _edits(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ids, counts, seen, biases = self._table.flatten(1)
        return ids, counts, seen, biases.view(torch.float32)

    def apply(self, logits: Tensor) -> None:
        """Changes ``[P, V]`` float32 logits, a row a draw, in place."""
        penalties_kernel[(len(logits),)](
            logits, self._starts, self._ends, *self._edits(), *self._rows, logits.stride(0),
            BLOCK=_BLOCK, enable_fp_fusion=False,
        )  # fmt: skip

    def count(self, drawn: Tensor) -> None:
        """Notes int32 ``[P]`` tokens that were drawn; -1 is none."""
        if not self._room:
            self._grow()
        self._room -= 1
        count_kernel[(len(drawn),)](drawn, self._starts, self._ends, *self._edits(), BLOCK=_BLOCK)

    def _grow(self) -> None:
        """Twice the width, without a look at how full the rows are."""
        _, count, width = self._table.shape
        table = torch.zeros(4, count, 2 * width, dtype=torch.int32, device=self._device)
        table[:, :, :width] = self._table
        self._room, self._width = width, 2 * width
        self._lay_out(table, self._ends - self._starts)


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
        logits, offsets[:-1], offsets[1:], ids, counts, seen, biases, repetition, presence,
        frequency, logits.stride(0), BLOCK=_BLOCK, enable_fp_fusion=False,
    )  # fmt: skip
