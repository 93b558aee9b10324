"""Mends what Triton 3.7's interpreter gets wrong, and one thing that it does slowly.

It keeps bfloat16 as raw 16-bit patterns, multiplies these in ``tl.dot``, and truncates where a
float32 is cast to bfloat16. Sums and products of bfloat16 stay wrong: our kernels do them in
float32. It also copies every tensor's whole storage back after a launch, to itself on a CPU.

Its ``tl.dot`` is numpy's product, whose BLAS adds a row up in another order at another place of the
matrix. A device's matrix instructions do not: here each row is a product of its own.
"""

from __future__ import annotations

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def _widened(handle):
    if handle.dtype.scalar == tl.bfloat16:
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    return handle.data.astype(np.float32) if handle.dtype.scalar == tl.float16 else handle.data


def _rounded(values: np.ndarray) -> np.ndarray:
    """float32 to the nearest bfloat16, ties to even, as raw patterns."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    nearest = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), nearest.astype(np.uint16))


def apply() -> None:
    builder = interpreter.InterpreterBuilder
    plain_cast = builder.cast_impl

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        rows = np.matmul(_widened(a)[:, None, :], _widened(b)[None])
        product = rows[:, 0].astype(d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    def cast_impl(self, source, target):
        if source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16:
            return interpreter.TensorHandle(_rounded(source.data), tl.bfloat16)
        return plain_cast(self, source, target)

    builder.create_dot, builder.cast_impl = create_dot, cast_impl
    interpreter.GridExecutor._restore_args_dev = lambda *_: None
