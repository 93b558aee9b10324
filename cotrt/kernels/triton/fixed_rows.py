"""A linear layer whose rows do not depend on the batch, for deterministic=True.

cuBLAS chooses a kernel by the number of rows, and each adds up in an order of its own. Here a
weight has one tile, whatever is multiplied by it: rows are padded to it, and a row's sum is one
chain over the inputs, of steps of one size, in float32. Nothing is split along the inputs.

The other row-wise kernels (norms, rotary, the gate) are one row a program or go by element, and
serve both modes as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from ..dispatch import Backend


@dataclass(frozen=True, slots=True)
class LinearTile:
    """What a product is cut into.

    Attributes:
        rows: of ``x`` a program takes.
        outputs: of the weight a program takes.
        inputs: a step of its loop takes.
        num_warps: warps a program.
        num_stages: steps whose loads are in flight.
    """

    rows: int
    outputs: int
    inputs: int
    num_warps: int = 4
    num_stages: int = 3


def tile_for(num_outputs: int, dtype: torch.dtype) -> LinearTile:
    """The tile of a weight: by its outputs and dtype alone.

    Decoding is a matter of the weight's bytes in flight: the fewer outputs, the narrower the tile,
    for enough programs, and the more of a row each has on its way.
    """
    if dtype == torch.float32:
        return LinearTile(32, 32, 32)
    if num_outputs >= 8192:
        return LinearTile(64, 128, 64)
    if num_outputs >= 2048:
        return LinearTile(64, 64, 64, num_stages=4)
    return LinearTile(64, 32, 128)


# The number of rows changes from step to step: it must not choose another compiled variant.
@triton.jit(do_not_specialize=["num_rows"])
def fixed_linear_kernel(
    x_ptr,  # [T, N]
    weight_ptr,  # [M, N]
    bias_ptr,  # [M]
    out_ptr,  # [T, M]
    num_rows,
    num_outputs,
    num_inputs,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of the output a program; programs that read the same weights are neighbours."""
    row_tiles = tl.cdiv(num_rows, ROWS)
    program = tl.program_id(0)
    row = (program % row_tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    output = (program // row_tiles).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row, is_output = row < num_rows, output < num_outputs
    x_ptr += row[:, None] * num_inputs
    weight_ptr += output[:, None] * num_inputs
    acc = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for begin in tl.range(0, num_inputs, INPUTS):
        offs = begin + tl.arange(0, INPUTS)
        is_input = (offs < num_inputs)[None, :]
        x = tl.load(x_ptr + offs[None, :], mask=is_row[:, None] & is_input, other=0.0)
        w = tl.load(weight_ptr + offs[None, :], mask=is_output[:, None] & is_input, other=0.0)
        acc = tl.dot(x, tl.trans(w), acc, input_precision=PRECISION)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
    out_offs = row[:, None] * num_outputs + output[None, :]
    written = is_row[:, None] & is_output[None, :]
    tl.store(out_ptr + out_offs, acc.to(out_ptr.dtype.element_ty), mask=written)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x [T, N] @ weight [M, N].T + bias [M] -> [T, M]``, in the dtype of ``x``.

    A row's bits depend on the row, the weight and the bias only.
    """
    num_rows, num_inputs = x.shape
    num_outputs = len(weight)
    assert weight.shape == (num_outputs, num_inputs) and weight.is_contiguous()
    assert x.dtype == weight.dtype and (bias is None or bias.is_contiguous())
    x = x.contiguous()
    out = torch.empty(num_rows, num_outputs, dtype=x.dtype, device=x.device)
    if out.numel():
        tile = tile_for(num_outputs, x.dtype)
        programs = triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_outputs, tile.outputs)
        fixed_linear_kernel[(programs,)](
            x,
            weight,
            weight if bias is None else bias,
            out,
            num_rows,
            num_outputs,
            num_inputs,
            **linear_constants(tile, x.dtype, bias is not None),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
    return out


def linear_constants(
    tile: LinearTile, dtype: torch.dtype, has_bias: bool
) -> dict[str, int | str | bool]:
    """The compile-time arguments of the kernel."""
    return {
        "HAS_BIAS": has_bias,
        "ROWS": tile.rows,
        "OUTPUTS": tile.outputs,
        "INPUTS": tile.inputs,
        # Exact products for float32 inputs; 16-bit ones are exact in any mode.
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
    }


def in_fixed_rows(backend: Backend) -> Backend:
    """The backend with this linear layer in place of cuBLAS."""
    return replace(backend, linear=linear)
