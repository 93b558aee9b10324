"""The two kernels of deterministic plans: attend in fixed chunks, then add results up in order.

A chunk is 256 keys that begin at a multiple of 256. Each gives a row an output that is not
normalised, its largest score and the sum of its weights; a row's chunks are added up from root to
leaf, one after the other, by `_add_chunk`: within an item that holds several, and in the merge.

There is one tile for all items, so that a row meets the same instructions in the same order
wherever it is computed. Both kernels are launched without floating-point fusion: the compiler would
else be free to fuse other products and sums in one than in the other.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .attention_kernel import (
    _CAUSAL,
    _ENTRY,
    _LEN,
    _OUTPUT,
    _ROWS,
    _SLOT,
    _START,
    _attend_keys,
)


@triton.jit
def _add_chunk(acc, top, total, more, more_top, more_total):
    """A row's state so far and its next chunk as one state; nothing seen has a top of -inf."""
    new_top = tl.maximum(top, more_top)
    # Nothing seen on either side: 0 in place of -inf makes both weights 0.
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    before = tl.exp2(top - shift)
    here = tl.exp2(more_top - shift)
    acc = acc * before[:, None] + more * here[:, None]
    return acc, new_top, total * before + more_total * here


@triton.jit
def _normalised(acc, total):
    """The output of a state, and +0.0 for -0.0: keys of weight 0 may turn one into the other."""
    return acc * tl.div_rn(1.0, tl.where(total > 0.0, total, 1.0))[:, None] + 0.0


@triton.jit
def attend_chunks_kernel(
    q_ptr,  # [T, Hq, D]
    k_ptr,  # [num_blocks, Hkv, BS, D]
    v_ptr,  # like k
    out_ptr,  # [T, Hq, D]
    partial_ptr,  # [partials, Hq, D] float32, not normalised
    state_ptr,  # [partials, Hq, 2] float32: largest score (base 2), sum of weights
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
    FIELDS: tl.constexpr, CHUNK: tl.constexpr,
    G: tl.constexpr, BLOCK_G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BS: tl.constexpr, TILE: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Persistent over (item, KV head), dealt back and forth; an item begins with a chunk."""
    num_works = tl.load(counts_ptr) * num_kv_heads
    num_programs = tl.num_programs(0)
    program = tl.program_id(0)
    num_q_heads = num_kv_heads * G
    offs_m = tl.arange(0, TILE)
    offs_d = tl.arange(0, BLOCK_D)
    in_d = offs_d < D
    for deal in tl.range(0, tl.cdiv(num_works, num_programs)):
        turn = tl.where(deal % 2 == 0, program, num_programs - 1 - program)
        work = deal * num_programs + turn
        if work < num_works:
            item_ptr = items_ptr + (work // num_kv_heads) * FIELDS
            head = work % num_kv_heads
            start = tl.load(item_ptr + _START)
            output = tl.load(item_ptr + _OUTPUT)
            item_entries_ptr = entries_ptr + tl.load(item_ptr + _ENTRY)

            slot = offs_m // BLOCK_G
            is_row = (slot < tl.load(item_ptr + _ROWS)) & (offs_m % BLOCK_G < G)
            slot += tl.load(item_ptr + _SLOT)
            row = tl.load(slot_rows_ptr + slot, mask=is_row, other=0)
            position = tl.load(positions_ptr + row, mask=is_row, other=0)
            q_head = head * G + offs_m % BLOCK_G
            in_tile = is_row[:, None] & in_d[None, :]
            q_offs = row * stride_q_row + q_head * stride_q_head
            q = tl.load(q_ptr + (q_offs[:, None] + offs_d[None, :]), mask=in_tile, other=0.0)

            limit = tl.load(item_ptr + _LEN) + tl.zeros([TILE], tl.int32)
            if tl.load(item_ptr + _CAUSAL) != 0:
                limit = tl.minimum(limit, tl.maximum(position - start + 1, 0))
            limit = tl.where(is_row, limit, 0)  # how many tokens of the run each row sees
            last = tl.max(limit, 0)

            head_k_ptr = k_ptr + head.to(tl.int64) * stride_head
            head_v_ptr = v_ptr + head.to(tl.int64) * stride_head
            acc = tl.zeros([TILE, BLOCK_D], tl.float32)
            top = tl.full([TILE], float("-inf"), tl.float32)
            total = tl.zeros([TILE], tl.float32)
            for chunk in tl.range(0, last, CHUNK):
                chunk_acc = tl.zeros([TILE, BLOCK_D], tl.float32)
                chunk_top = tl.full([TILE], float("-inf"), tl.float32)
                chunk_total = tl.zeros([TILE], tl.float32)
                for token in tl.range(chunk, tl.minimum(chunk + CHUNK, last), BLOCK_N):
                    chunk_acc, chunk_top, chunk_total = _attend_keys(
                        chunk_acc, chunk_top, chunk_total, q, token, last, limit,
                        item_entries_ptr, head_k_ptr, head_v_ptr, qk_scale,
                        stride_block, stride_token, D, BLOCK_D, BS, BLOCK_N, PRECISION,
                    )  # fmt: skip
                acc, top, total = _add_chunk(acc, top, total, chunk_acc, chunk_top, chunk_total)

            partial = tl.load(slot_partials_ptr + slot, mask=is_row, other=-1)
            if (output & 1) != 0:
                out_offs = row * stride_out_row + q_head * stride_out_head
                written = in_tile & (partial < 0)[:, None]
                value = _normalised(acc, total).to(out_ptr.dtype.element_ty)
                tl.store(out_ptr + (out_offs[:, None] + offs_d[None, :]), value, mask=written)
            if (output & 2) != 0:
                to_partial = is_row & (partial >= 0)
                offs = partial * num_q_heads + q_head
                written = in_tile & to_partial[:, None]
                tl.store(partial_ptr + (offs[:, None] * D + offs_d[None, :]), acc, mask=written)
                tl.store(state_ptr + 2 * offs, top, mask=to_partial)
                tl.store(state_ptr + 2 * offs + 1, total, mask=to_partial)


@triton.jit
def merge_chunks_kernel(
    partial_ptr,  # [partials, Hq, D] float32, not normalised
    state_ptr,  # [partials, Hq, 2] float32: largest score (base 2), sum of weights
    out_ptr,  # [T, Hq, D]
    counts_ptr,  # [1]: rows to merge
    rows_ptr,  # [rows to merge] row of each
    offsets_ptr,  # [rows to merge + 1] where the partials of each begin
    partials_ptr,  # [...] partials, row after row, root to leaf
    num_q_heads,
    stride_out_row, stride_out_head,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Each row's results added up as if one item had held all of its chunks."""
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
            value = tl.load(
                partial_ptr + offs[:, None] * D + offs_d[None, :], mask=in_tile, other=0.0
            )
            more_top = tl.load(state_ptr + 2 * offs, mask=is_head, other=float("-inf"))
            more_total = tl.load(state_ptr + 2 * offs + 1, mask=is_head, other=0.0)
            acc, top, total = _add_chunk(acc, top, total, value, more_top, more_total)
        offs = row * stride_out_row + head * stride_out_head
        value = _normalised(acc, total).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + offs[:, None] + offs_d[None, :], value, mask=in_tile)
