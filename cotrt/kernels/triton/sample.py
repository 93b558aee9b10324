"""Draws tokens on the device: what kernels/reference/sample.py defines, in one launch.

Filters add up float32 weights where the reference has float64 ones; a token whose cumulative mass
lies within rounding of top_p may fall on the other side. All else is equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..cuda import on_device, to_device
from ..reference.sample import MIN_TEMPERATURE
from .penalties import Edits, Penalties
from .sample_kernel import sample_kernel

BLOCK = 1024
CANDIDATES = 8192

Array = npt.NDArray[Any] | Tensor


class Sampler:
    """Draws on one device; what does not change from step to step is there already.

    Arrays that it was given are never to change: the next call may find by identity that what
    lies on the device still serves.

    Args:
        device: of the logits.

    Attributes:
        takes_edits: penalties and biases are its own affair.
        num_copies: arrays that were copied to the device so far.
    """

    takes_edits = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[str, tuple[npt.NDArray[Any], Tensor]] = {}
        self._found = torch.empty(0, CANDIDATES, dtype=torch.int32, device=device)
        self._edits: tuple[Any, Penalties, Array] | None = None
        self.num_copies = 0

    def __call__(
        self,
        logits: Tensor,
        rows: Array,
        temperature: Array,
        top_k: Array,
        top_p: Array,
        min_p: Array,
        key_low: Array,
        key_high: Array,
        *,
        raw: Tensor | None = None,
        raw_rows: Array | None = None,
        edits: Sequence[Edits | None] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draws D tokens; nothing is read back, so the caller need not wait.

        Arguments but the logits are numpy arrays, copied to the device, or tensors that lie there.

        Args:
            logits: float32 ``[R, V]`` to draw from, never changed.
            rows: ``[D]`` row of each draw.
            temperature: ``[D]``; 0 is greedy.
            top_k: ``[D]``; 0 is off.
            top_p: ``[D]``; 1 is off.
            min_p: ``[D]``; 0 is off.
            key_low: ``[D]`` halves of the draws' keys, `cotrt.sampling.noise.row_keys`.
            key_high: ``[D]``.
            raw: logits ``[.., V]`` whose log-softmax is reported; those drawn from when missing.
            raw_rows: ``[D]`` rows of these.
            edits: penalties and biases of each draw, or None. They are read when a list is given
                for the first time; as long as the same one comes again, what was drawn is counted
                on the device.

        Returns:
            On the device: token ids int32 ``[D]`` (-1 in bad draws), logprobs float32 ``[D]`` (NaN
            there), and bad bool ``[D]``: logits that hold NaN or +inf, or leave no token possible.
        """
        device = logits.device
        raw = logits if raw is None else raw
        for tensor in (logits, raw):
            assert tensor.dtype == torch.float32 and tensor.dim() == 2 and tensor.stride(1) == 1
        assert raw.shape[1] == logits.shape[1]
        count = len(rows)
        if edits is not None and count:
            return self._edited(
                logits, rows, edits, temperature, top_k, top_p, min_p, key_low, key_high
            )
        ids = torch.empty(count, dtype=torch.int32, device=device)
        logprobs = torch.empty(count, dtype=torch.float32, device=device)
        bad = torch.empty(count, dtype=torch.bool, device=device)
        if not count:
            return ids, logprobs, bad
        with on_device(device):
            where = self._keep("rows", rows, torch.int32)
            low, high = self._keys(key_low, key_high)
            sample_kernel[(count,)](
                logits,
                raw,
                where,
                where if raw_rows is None or raw_rows is rows
                else self._keep("raw_rows", raw_rows, torch.int32),
                self._keep("temperature", temperature, torch.float64, MIN_TEMPERATURE),
                self._keep("top_k", top_k, torch.int32),
                self._keep("top_p", top_p, torch.float64),
                self._keep("min_p", min_p, torch.float64),
                low,
                high,
                self._scratch(count),
                ids,
                logprobs,
                bad.view(torch.int8),
                logits.stride(0),
                raw.stride(0),
                logits.shape[1],
                CANDIDATES=CANDIDATES,
                BLOCK=BLOCK,
                num_warps=8,
            )  # fmt: skip
        return ids, logprobs, bad

    def _edited(
        self, logits: Tensor, rows: Array, edits: Sequence[Edits | None], *draws: Array
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draws from changed copies of the rows; logprobs are of the rows as they were."""
        with on_device(logits.device):
            if self._edits is None or self._edits[0] is not edits:
                each = np.arange(len(rows), dtype=np.int32)
                self._edits = edits, Penalties(edits, self._device), each
            penalties, places = self._edits[1:]
            changed = logits.index_select(0, self._keep("raw_rows", rows, torch.int32))
            penalties.apply(changed)
            found = self(changed, places, *draws, raw=logits, raw_rows=rows)
            penalties.count(found[0])
        return found

    def _keep(self, name: str, values: Array, dtype: torch.dtype, least: float = 0.0) -> Tensor:
        """An array on the device, copied only if it is not the one that was copied last.

        Values between 0 and `least` are raised to it.
        """
        if isinstance(values, Tensor):
            there = values.to(device=self._device, dtype=dtype).contiguous()
            return torch.where(there > 0, there.clamp(min=least), there) if least else there
        known = self._known.get(name)
        if known is None or known[0] is not values:
            host = values
            if least:
                host = values.astype(np.float64)
                host = np.where(host > 0, np.maximum(host, least), host)
            known = values, self._copy(torch.from_numpy(np.ascontiguousarray(host)).to(dtype))
            self._known[name] = known
        return known[1]

    def _keys(self, low: Array, high: Array) -> tuple[Tensor, Tensor]:
        """Both halves of the keys, which are new each step: one copy."""
        if isinstance(low, Tensor) or isinstance(high, Tensor):
            return self._keep("low", low, torch.int32), self._keep("high", high, torch.int32)
        # The bits of uint32 keys, not their values, fit an int32.
        both = np.stack((low, high)).view(np.int32)
        halves = self._copy(torch.from_numpy(both))
        return halves[0], halves[1]

    def _copy(self, host: Tensor) -> Tensor:
        self.num_copies += 1
        return to_device(host, self._device)

    def _scratch(self, count: int) -> Tensor:
        if len(self._found) < count or self._found.shape[1] != CANDIDATES:
            self._found = torch.empty(count, CANDIDATES, dtype=torch.int32, device=self._device)
        return self._found


def new_sampler(device: str | torch.device) -> Sampler:
    """A sampler for the logits of one device."""
    return Sampler(torch.device(device))


def sample(logits: Tensor, *draws: Array, **raw: Any) -> tuple[Tensor, Tensor, Tensor]:
    """One call of a new `Sampler`, with its arguments."""
    return Sampler(logits.device)(logits, *draws, **raw)
