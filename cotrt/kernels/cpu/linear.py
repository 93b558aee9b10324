"""Linears: torch's for a plain weight, and packed weights for everything that is read every step.

`PackedWeight` holds one linear (or several fused side by side) in the layout of docs/kernels.md.
It is filled straight from mapped tensors, a few rows at a time: there is never a second copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..reference.linear import linear
from .native import dtype_of, module

__all__ = ["PackedWeight", "linear"]


class PackedWeight:
    """Weights ``[n, k]`` packed for the native kernels.

    Attributes:
        n: outputs.
        k: inputs.
        native: the compiled object, for the decoder stack.
    """

    def __init__(
        self,
        sources: Sequence[Tensor],
        *,
        dtype: torch.dtype,
        biases: Sequence[Tensor] | None = None,
        interleave: bool = False,
        fixed_order: bool = False,
    ) -> None:
        """Pack ``sources`` one under the other.

        Args:
            sources: ``[rows, k]`` each; float32, bfloat16 or float16.
            dtype: float32 or bfloat16 to round to, or int8: one scale a row, symmetric. Some
                instruction sets keep bfloat16 as int16 with a scale a row (docs/kernels.md).
            biases: ``[rows]`` each, or None.
            interleave: two sources, gate and up, for `silu_mul`.
            fixed_order: a row's bits do not depend on the other rows of a call.
        """
        self.n, self.k = sum(len(s) for s in sources), int(sources[0].shape[1])
        native_dtype = dtype_of(torch.empty(0, dtype=dtype))
        self.native: Any = module().PackedLinear(self.n, self.k, native_dtype, interleave)
        self.dtype = dtype
        self.interleave = interleave
        self.fixed_order = fixed_order
        row = 0
        for index, source in enumerate(sources):
            source = source.detach().contiguous()
            self.native.fill(row, len(source), source.data_ptr(), dtype_of(source))
            if biases is not None:
                bias = biases[index].detach().float().contiguous()
                self.native.fill_bias(row, len(bias), bias.data_ptr())
            row += len(source)

    @property
    def activation_dtype(self) -> torch.dtype:
        """What `x` must be: float32 beside float32 weights, else bfloat16."""
        return torch.float32 if self.dtype == torch.float32 else torch.bfloat16

    def row(self, index: int) -> Tensor:
        """One row of the weight, float32 ``[k]``: an embedding."""
        out = torch.empty(self.k, dtype=torch.float32)
        self.native.unpack_row(index, out.data_ptr())
        return out

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """``x W^T + bias``, ``[T, n]``."""
        return self._run(x, self.n, out_dtype or x.dtype, "store")

    def silu_mul(self, x: Tensor) -> Tensor:
        """``silu(gate) * up`` of an interleaved pair, ``[T, n / 2]``."""
        assert self.interleave
        return self._run(x, self.n // 2, x.dtype, "silu_mul")

    def add_to(self, x: Tensor, residual: Tensor) -> None:
        """``residual += x W^T + bias``; float32 ``[T, n]``."""
        assert residual.dtype == torch.float32 and residual.shape == (len(x), self.n)
        self._run(x, self.n, torch.float32, "add", residual)

    def _run(
        self, x: Tensor, n: int, dtype: torch.dtype, epilogue: str, out: Tensor | None = None
    ) -> Tensor:
        assert x.shape[1] == self.k and x.dtype == self.activation_dtype, (x.shape, x.dtype)
        x = x.contiguous()
        if out is None:
            out = torch.empty((len(x), n), dtype=dtype)
        if len(x):
            self.native.run(
                x.data_ptr(), x.stride(0) * x.itemsize, len(x), out.data_ptr(),
                out.stride(0) * out.itemsize, dtype_of(out),
                getattr(module().Epilogue, epilogue), *((True,) if self.fixed_order else ()),
            )  # fmt: skip
        return out
