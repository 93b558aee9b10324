"""Mends what Triton 3.7's interpreter gets wrong about bfloat16, and one thing that it does slowly.

It keeps bfloat16 as raw 16-bit patterns, multiplies these in ``tl.dot``, and truncates where a
float32 is cast to bfloat16. Sums and products of bfloat16 stay wrong: our kernels do them in
float32. It also copies every tensor's whole storage back after a launch, to itself on a CPU.
"""

from __future__ import annotations

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def _widened(handle):
    if handle.dtype.scalar != tl.bfloat16:
        return handle.data
    return (handle.data.astype(np.uint32) << 16).view(np.float32)


def _rounded(values: np.ndarray) -> np.ndarray:
    """float32 to the nearest bfloat16, ties to even, as raw patterns."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    nearest = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), nearest.astype(np.uint16))


def apply() -> None:
    builder = interpreter.InterpreterBuilder
    plain_dot, plain_cast = builder.create_dot, builder.cast_impl

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        if tl.bfloat16 not in (a.dtype.scalar, b.dtype.scalar):
            return plain_dot(self, a, b, d, input_precision, max_num_imprecise_acc)
        product = np.matmul(_widened(a), _widened(b)).astype(d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    def cast_impl(self, source, target):
        if source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16:
            return interpreter.TensorHandle(_rounded(source.data), tl.bfloat16)
        return plain_cast(self, source, target)

    builder.create_dot, builder.cast_impl = create_dot, cast_impl
    interpreter.GridExecutor._restore_args_dev = lambda *_: None
