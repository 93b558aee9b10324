"""The two kernels of tree attention: attend to a work list of groups, then merge in order.

Constants of a variant are constexpr because they shape tiles, or because a division by them must
be a shift or a multiplication. Everything that changes with the plan or with the model's depth is
a run-time value, so that a plan never compiles anything.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634

# Fields of a work item, int32, in the order that attention_work writes them.
ITEM_FIELDS = 8
_ENTRY = tl.constexpr(0)  # where its run begins in the list of blocks
_LEN = tl.constexpr(1)  # tokens of the run
_START = tl.constexpr(2)  # absolute position of the first
_SLOT = tl.constexpr(3)  # its first slot
_ROWS = tl.constexpr(4)  # how many slots it has, all of one group
_HIGH = tl.constexpr(5)  # 1: it takes the high tile
_CAUSAL = tl.constexpr(6)  # 1: a row sees positions up to its own
_OUTPUT = tl.constexpr(7)  # bit 0: some rows go to the output; bit 1: some are partials


@triton.jit
def _attend_keys(
    acc, top, total, q, token, last, limit, entries_ptr, k_ptr, v_ptr, qk_scale,
    stride_block, stride_token,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BS: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A state of rows, and the same with the keys of one step of the loop, from `token` on.

    The state: an output that is not normalised, the largest score (base 2), the sum of weights.
    """
    offs_d = tl.arange(0, BLOCK_D)
    offs_n = token + tl.arange(0, BLOCK_N)
    in_n = offs_n < last
    block = tl.load(entries_ptr + offs_n // BS, mask=in_n, other=0).to(tl.int64)
    offs = block * stride_block + (offs_n % BS) * stride_token
    offs = offs[:, None] + offs_d[None, :]
    mask = in_n[:, None] & (offs_d < D)[None, :]
    k = tl.load(k_ptr + offs, mask=mask, other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * qk_scale
    scores = tl.where(offs_n[None, :] < limit[:, None], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    # A row that has seen nothing yet has top -inf: 0 in its place makes its weights 0.
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    alpha = tl.exp2(top - shift)
    p = tl.exp2(scores - shift[:, None])
    total = total * alpha + tl.sum(p, 1)
    v = tl.load(v_ptr + offs, mask=mask, other=0.0)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    return acc, new_top, total


@triton.jit
def _attend_item(
    item_ptr, head, num_q_heads,
    q_ptr, k_ptr, v_ptr, out_ptr, partial_ptr, lse_ptr,
    entries_ptr, slot_rows_ptr, slot_partials_ptr, positions_ptr,
    qk_scale, stride_q_row, stride_q_head, stride_out_row, stride_out_head,
    stride_block, stride_head, stride_token,
    G: tl.constexpr, BLOCK_G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BS: tl.constexpr, TILE: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One item and KV head: TILE // BLOCK_G rows, their G query heads stacked."""
    entry = tl.load(item_ptr + _ENTRY)
    length = tl.load(item_ptr + _LEN)
    start = tl.load(item_ptr + _START)
    first_slot = tl.load(item_ptr + _SLOT)
    num_rows = tl.load(item_ptr + _ROWS)
    causal = tl.load(item_ptr + _CAUSAL)
    output = tl.load(item_ptr + _OUTPUT)

    offs_m = tl.arange(0, TILE)
    # Heads padded to a power of two: neighbours in a tile then share what belongs to a row.
    slot = offs_m // BLOCK_G
    is_row = (slot < num_rows) & (offs_m % BLOCK_G < G)
    slot = first_slot + slot
    row = tl.load(slot_rows_ptr + slot, mask=is_row, other=0)
    position = tl.load(positions_ptr + row, mask=is_row, other=0)
    q_head = head * G + offs_m % BLOCK_G
    offs_d = tl.arange(0, BLOCK_D)
    in_d = offs_d < D
    in_tile = is_row[:, None] & in_d[None, :]
    q_offs = row * stride_q_row + q_head * stride_q_head
    q = tl.load(q_ptr + (q_offs[:, None] + offs_d[None, :]), mask=in_tile, other=0.0)

    limit = length + tl.zeros([TILE], tl.int32)
    if causal != 0:
        limit = tl.minimum(limit, tl.maximum(position - start + 1, 0))
    limit = tl.where(is_row, limit, 0)  # how many tokens of the run each row sees
    last = tl.max(limit, 0)

    entries_ptr += entry
    k_ptr += head.to(tl.int64) * stride_head
    v_ptr += head.to(tl.int64) * stride_head
    acc = tl.zeros([TILE, BLOCK_D], tl.float32)
    top = tl.full([TILE], float("-inf"), tl.float32)  # largest score so far, base 2
    total = tl.zeros([TILE], tl.float32)
    for token in tl.range(0, last, BLOCK_N):
        acc, top, total = _attend_keys(
            acc, top, total, q, token, last, limit, entries_ptr, k_ptr, v_ptr, qk_scale,
            stride_block, stride_token, D, BLOCK_D, BS, BLOCK_N, PRECISION,
        )  # fmt: skip

    seen = total > 0.0
    total = tl.where(seen, total, 1.0)  # a row that sees nothing: 0, with weight 0 (lse -inf)
    acc = acc / total[:, None]
    partial = tl.load(slot_partials_ptr + slot, mask=is_row, other=-1)
    if (output & 1) != 0:
        out_offs = row * stride_out_row + q_head * stride_out_head
        written = in_tile & (partial < 0)[:, None]
        value = acc.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + (out_offs[:, None] + offs_d[None, :]), value, mask=written)
    if (output & 2) != 0:
        to_partial = is_row & (partial >= 0)
        offs = partial * num_q_heads + q_head
        written = in_tile & to_partial[:, None]
        tl.store(partial_ptr + (offs[:, None] * D + offs_d[None, :]), acc, mask=written)
        lse = tl.where(seen, top + tl.log2(total), float("-inf"))
        tl.store(lse_ptr + offs, lse, mask=to_partial)


@triton.jit
def attend_kernel(
    q_ptr,  # [T, Hq, D]
    k_ptr,  # [num_blocks, Hkv, BS, D]
    v_ptr,  # like k
    out_ptr,  # [T, Hq, D]
    partial_ptr,  # [partials, Hq, D] float32
    lse_ptr,  # [partials, Hq] float32, base 2
    counts_ptr,  # [0]: items
    items_ptr,  # [items, ITEM_FIELDS], long ones first
    entries_ptr,  # block ids, run after run
    slot_rows_ptr,  # [slots] row of each slot
    slot_partials_ptr,  # [slots] where its partial goes; -1: it is written to the output
    positions_ptr,  # [T] absolute position of each row
    qk_scale,  # scale * log2(e)
    num_kv_heads,
    stride_q_row, stride_q_head, stride_out_row, stride_out_head,
    stride_block, stride_head, stride_token,
    FIELDS: tl.constexpr,
    G: tl.constexpr, BLOCK_G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BS: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Persistent over (item, KV head): dealt back and forth, so that long ones spread evenly."""
    num_works = tl.load(counts_ptr) * num_kv_heads
    num_programs = tl.num_programs(0)
    program = tl.program_id(0)
    for deal in tl.range(0, tl.cdiv(num_works, num_programs)):
        turn = tl.where(deal % 2 == 0, program, num_programs - 1 - program)
        work = deal * num_programs + turn
        if work < num_works:
            item_ptr = items_ptr + (work // num_kv_heads) * FIELDS
            head = work % num_kv_heads
            if LOW == HIGH:
                _attend_item(
                    item_ptr, head, num_kv_heads * G,
                    q_ptr, k_ptr, v_ptr, out_ptr, partial_ptr, lse_ptr,
                    entries_ptr, slot_rows_ptr, slot_partials_ptr, positions_ptr,
                    qk_scale, stride_q_row, stride_q_head, stride_out_row, stride_out_head,
                    stride_block, stride_head, stride_token,
                    G, BLOCK_G, D, BLOCK_D, BS, LOW, BLOCK_N, PRECISION,
                )  # fmt: skip
            else:
                if tl.load(item_ptr + _HIGH) == 0:
                    _attend_item(
                        item_ptr, head, num_kv_heads * G,
                        q_ptr, k_ptr, v_ptr, out_ptr, partial_ptr, lse_ptr,
                        entries_ptr, slot_rows_ptr, slot_partials_ptr, positions_ptr,
                        qk_scale, stride_q_row, stride_q_head, stride_out_row, stride_out_head,
                        stride_block, stride_head, stride_token,
                        G, BLOCK_G, D, BLOCK_D, BS, LOW, BLOCK_N, PRECISION,
                    )  # fmt: skip
                else:
                    _attend_item(
                        item_ptr, head, num_kv_heads * G,
                        q_ptr, k_ptr, v_ptr, out_ptr, partial_ptr, lse_ptr,
                        entries_ptr, slot_rows_ptr, slot_partials_ptr, positions_ptr,
                        qk_scale, stride_q_row, stride_q_head, stride_out_row, stride_out_head,
                        stride_block, stride_head, stride_token,
                        G, BLOCK_G, D, BLOCK_D, BS, HIGH, BLOCK_N, PRECISION,
                    )  # fmt: skip


@triton.jit
def merge_kernel(
    partial_ptr,  # [partials, Hq, D] float32
    lse_ptr,  # [partials, Hq] float32, base 2
    out_ptr,  # [T, Hq, D]
    counts_ptr,  # [1]: rows to merge
    rows_ptr,  # [rows to merge] row of each
    offsets_ptr,  # [rows to merge + 1] where the partials of each begin
    partials_ptr,  # [...] partials, row after row, root to leaf
    num_q_heads,
    stride_out_row, stride_out_head,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Each row's partials by log-sum-exp, root to leaf: a fixed order, and no atomics."""
    tiles = tl.cdiv(num_q_heads, BLOCK_H)
    num_works = tl.load(counts_ptr + 1) * tiles
    offs_d = tl.arange(0, BLOCK_D)
    for work in tl.range(tl.program_id(0), num_works, tl.num_programs(0)):
        index = work // tiles
        head = (work % tiles) * BLOCK_H + tl.arange(0, BLOCK_H)
        is_head = head < num_q_heads
        in_tile = is_head[:, None] & (offs_d < D)[None, :]
        row = tl.load(rows_ptr + index).to(tl.int64)
        acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
        top = tl.full([BLOCK_H], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_H], tl.float32)
        for place in tl.range(tl.load(offsets_ptr + index), tl.load(offsets_ptr + index + 1)):
            partial = tl.load(partials_ptr + place).to(tl.int64)
            offs = partial * num_q_heads + head
            lse = tl.load(lse_ptr + offs, mask=is_head, other=float("-inf"))
            value = tl.load(
                partial_ptr + offs[:, None] * D + offs_d[None, :], mask=in_tile, other=0.0
            )
            new_top = tl.maximum(top, lse)
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)
            alpha = tl.exp2(top - shift)
            weight = tl.exp2(lse - shift)
            acc = acc * alpha[:, None] + value * weight[:, None]
            total = total * alpha + weight
            top = new_top
        acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
        offs = row * stride_out_row + head * stride_out_head
        value = acc.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + offs[:, None] + offs_d[None, :], value, mask=in_tile)
