"""One draw a program, from logits to a token: no sort, and nothing that the host must look at.

Filters keep a token if its logit is above a threshold, or equal to it and among the first `ties`
of those. A threshold is found bit by bit, as a 32-bit key that orders as the logits do: the largest
key that enough tokens (top-k) or enough mass (top-p) reach. The search runs over candidates only:
tokens above a bound that is known beforehand, as long as they are at most CANDIDATES.

Weights that filters add up are float32 and their sums float64; scores that decide are float64 as in
the reference, so that the same noise draws the same token. Noise is bounded above by
-log(1 - u), which says of most tiles, with one float32 logarithm, that nothing in them can win.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LOWEST = tl.constexpr(-(1 << 31))


@triton.jit
def _key(x):
    """int64 in [0, 2^32) that orders as float32 ``x``; -0.0 and 0.0 are equal."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) - _LOWEST


@triton.jit
def _noise_bits(low, high, ids):
    """32 random bits a token, uint32: `cotrt.sampling.noise.noise_bits`."""
    bits = ids.to(tl.uint32) * 0x9E3779B9 + low
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15) ^ high) * 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit
def _read(logits_ptr, found_ptr, begin, num_read, COMPACT: tl.constexpr, BLOCK: tl.constexpr):
    """A tile of logits (-inf past the end) and their ids: of candidates, or of the vocabulary."""
    offs = begin + tl.arange(0, BLOCK)
    mask = offs < num_read
    ids = tl.load(found_ptr + offs, mask=mask, other=0) if COMPACT else offs
    return tl.load(logits_ptr + ids, mask=mask, other=float("-inf")), ids


@triton.jit
def _kth_of_lanes(lanes, k):
    """A key that at least ``k`` of the lanes reach, the largest such: int64 scalar."""
    key = _key(lanes)
    found = tl.zeros([], tl.int64)
    for step in tl.range(0, 32):
        trial = found | (tl.full([], 1, tl.int64) << (31 - step))
        found = tl.where(tl.sum((key >= trial).to(tl.int32), 0) >= k, trial, found)
    return found


@triton.jit
def _threshold(
    logits_ptr, found_ptr, num_read, top, inverse, k, top_p, total,
    COMPACT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Key and ties of what top-k and then top-p keep. ``k`` 0 and ``top_p`` 1 are off.

    ``total`` is the mass of the vocabulary, used where top-k is off.
    """
    threshold = tl.zeros([], tl.int64)
    ties = tl.full([], 0x7FFFFFFF, tl.int32)
    if k > 0:
        for step in tl.range(0, 32):
            trial = threshold | (tl.full([], 1, tl.int64) << (31 - step))
            count = tl.zeros([], tl.int32)
            for begin in tl.range(0, num_read, BLOCK):
                x, _ = _read(logits_ptr, found_ptr, begin, num_read, COMPACT, BLOCK)
                count += tl.sum((_key(x) >= trial).to(tl.int32), 0)
            threshold = tl.where(count >= k, trial, threshold)
        above = tl.zeros([], tl.int32)
        mass = tl.zeros([], tl.float64)
        at = tl.full([], float("-inf"), tl.float32)
        for begin in tl.range(0, num_read, BLOCK):
            x, _ = _read(logits_ptr, found_ptr, begin, num_read, COMPACT, BLOCK)
            is_above = _key(x) > threshold
            weight = tl.exp((x - top) * inverse)
            above += tl.sum(is_above.to(tl.int32), 0)
            mass += tl.sum(tl.where(is_above, weight, 0.0).to(tl.float64), 0)
            at = tl.maximum(at, tl.max(tl.where(_key(x) == threshold, x, float("-inf")), 0))
        ties = k - above
        total = mass + ties * tl.exp((at - top) * inverse).to(tl.float64)
    if top_p < 1.0:
        kept = threshold
        # A top_p of 0 still keeps the likeliest token.
        goal = tl.maximum(top_p.to(tl.float64) * total, 1e-300)
        threshold = tl.zeros([], tl.int64)
        for step in tl.range(0, 32):
            trial = threshold | (tl.full([], 1, tl.int64) << (31 - step))
            if trial <= kept:
                threshold = trial
            else:
                mass = tl.zeros([], tl.float64)
                for begin in tl.range(0, num_read, BLOCK):
                    x, _ = _read(logits_ptr, found_ptr, begin, num_read, COMPACT, BLOCK)
                    weight = tl.where(_key(x) >= trial, tl.exp((x - top) * inverse), 0.0)
                    mass += tl.sum(weight.to(tl.float64), 0)
                threshold = tl.where(mass >= goal, trial, threshold)
        mass = tl.zeros([], tl.float64)
        at = tl.full([], float("-inf"), tl.float32)
        for begin in tl.range(0, num_read, BLOCK):
            x, _ = _read(logits_ptr, found_ptr, begin, num_read, COMPACT, BLOCK)
            weight = tl.where(_key(x) > threshold, tl.exp((x - top) * inverse), 0.0)
            mass += tl.sum(weight.to(tl.float64), 0)
            at = tl.maximum(at, tl.max(tl.where(_key(x) == threshold, x, float("-inf")), 0))
        each = tl.exp((at - top) * inverse).to(tl.float64)
        # A tie is kept as long as what comes before it has less than the goal.
        wanted = tl.where(each > 0.0, (goal - mass) / tl.where(each > 0.0, each, 1.0), 1.0)
        wanted = tl.maximum(tl.ceil(tl.minimum(wanted, 1e9)), 1.0).to(tl.int32)
        ties = tl.where(threshold > kept, wanted, tl.minimum(wanted, ties))
    return threshold, ties


@triton.jit
def _race(
    logits_ptr, found_ptr, num_read, top, temperature, low, high, threshold, ties, min_p,
    COMPACT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The kept token of the largest score; ties of scores go to the lowest id."""
    best = tl.full([], float("-inf"), tl.float64)
    best_id = tl.full([], 0x7FFFFFFF, tl.int32)
    num_equal = tl.zeros([], tl.int32)
    inverse = (1.0 / temperature).to(tl.float32)
    for begin in tl.range(0, num_read, BLOCK):
        x, ids = _read(logits_ptr, found_ptr, begin, num_read, COMPACT, BLOCK)
        key = _key(x)
        is_equal = (key == threshold).to(tl.int32)
        place = num_equal + tl.cumsum(is_equal, 0)
        num_equal += tl.sum(is_equal, 0)
        keep = (x > float("-inf")) & ((key > threshold) | ((key == threshold) & (place <= ties)))
        bits = (_noise_bits(low, high, ids) >> 9).to(tl.int32)
        short = ((0x7FFFFF - bits).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 1 - u
        reach = tl.where(keep, x - top, 0.0) * inverse
        reach = reach - tl.log(short) + 1e-3 + tl.abs(reach) * 1e-6
        if tl.max(tl.where(keep, reach, float("-inf")), 0).to(tl.float64) >= best:
            scaled = tl.where(keep, x, top).to(tl.float64) - top.to(tl.float64)
            scaled = scaled / temperature
            keep = keep & (tl.exp(scaled) >= min_p)
            uniform = (bits.to(tl.float64) + 0.5) * 1.1920928955078125e-07
            score = tl.where(keep, scaled - tl.log(-tl.log(uniform)), float("-inf"))
            largest = tl.max(score, 0)
            first = tl.min(tl.where(keep & (score == largest), ids, 0x7FFFFFFF), 0)
            if largest > best:
                best = largest
                best_id = first
    return best_id


@triton.jit
def sample_kernel(
    logits_ptr,  # [R, V] float32
    raw_ptr,  # [.., V] float32
    rows_ptr,  # [D] int32
    raw_rows_ptr,  # [D] int32
    temperature_ptr,  # [D] float64, 0: greedy
    top_k_ptr,  # [D] int32, 0: off
    top_p_ptr,  # [D] float64, 1: off
    min_p_ptr,  # [D] float64, 0: off
    key_low_ptr,  # [D] int32, 32 bits
    key_high_ptr,  # [D] int32
    found_ptr,  # [D, CANDIDATES] int32, scratch
    ids_ptr,  # [D] int32, -1: bad
    logprobs_ptr,  # [D] float32, NaN: bad
    bad_ptr,  # [D] int8
    stride_logits, stride_raw, vocab_size,
    CANDIDATES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program d makes draw d."""
    draw = tl.program_id(0)
    logits_ptr += tl.load(rows_ptr + draw).to(tl.int64) * stride_logits
    raw_ptr += tl.load(raw_rows_ptr + draw).to(tl.int64) * stride_raw
    found_ptr += draw * CANDIDATES
    lane = tl.arange(0, BLOCK)

    lanes = tl.full([BLOCK], float("-inf"), tl.float32)
    is_bad = tl.zeros([BLOCK], tl.int32)
    first_of_lane = tl.zeros([BLOCK], tl.int32)
    for begin in tl.range(0, vocab_size, BLOCK):
        x, ids = _read(logits_ptr, found_ptr, begin, vocab_size, False, BLOCK)
        is_bad = is_bad | ((x != x) | (x == float("inf"))).to(tl.int32)
        first_of_lane = tl.where(x > lanes, ids, first_of_lane)
        lanes = tl.where(x > lanes, x, lanes)
    top = tl.max(lanes, 0)
    bad = (tl.max(is_bad, 0) != 0) | (top == float("-inf"))
    tl.store(bad_ptr + draw, bad.to(tl.int8))
    token = tl.min(tl.where(lanes == top, first_of_lane, 0x7FFFFFFF), 0)
    temperature = tl.load(temperature_ptr + draw)
    if bad:
        tl.store(ids_ptr + draw, -1)
        tl.store(logprobs_ptr + draw, float("nan"))
    else:
        if temperature > 0.0:
            inverse = (1.0 / temperature).to(tl.float32)
            k = tl.load(top_k_ptr + draw)
            k = tl.where(k < vocab_size, k, 0)
            top_p = tl.load(top_p_ptr + draw)
            min_p = tl.load(min_p_ptr + draw)
            low = tl.load(key_low_ptr + draw).to(tl.uint32, bitcast=True)
            high = tl.load(key_high_ptr + draw).to(tl.uint32, bitcast=True)
            total = tl.zeros([], tl.float64)
            count = tl.zeros([], tl.int32)
            is_filtered = (k > 0) | (top_p < 1.0) | (min_p > 0.0)
            if is_filtered:
                if (top_p < 1.0) & (k == 0):
                    for begin in tl.range(0, vocab_size, BLOCK):
                        x, _ = _read(logits_ptr, found_ptr, begin, vocab_size, False, BLOCK)
                        total += tl.sum(tl.exp((x - top) * inverse).to(tl.float64), 0)
                # What every kept token reaches: of the k largest lanes no smaller one is among
                # the k largest tokens; all tokens below (1 - p) / V do not make 1 - p.
                bound = tl.zeros([], tl.int64)
                if k > 0:
                    if k <= BLOCK:
                        bound = _kth_of_lanes(lanes, k)
                else:
                    share = tl.maximum(total * (1.0 - top_p) / vocab_size, min_p)
                    least = tl.log(tl.maximum(share, 1e-300)) * temperature * (1.0 + 1e-6)
                    least = top.to(tl.float64) + least - tl.abs(top).to(tl.float64) * 1e-6 - 1e-6
                    bound = _key(least.to(tl.float32))
                for begin in tl.range(0, vocab_size, BLOCK):
                    x, ids = _read(logits_ptr, found_ptr, begin, vocab_size, False, BLOCK)
                    reaches = ((_key(x) >= bound) & (x > float("-inf"))).to(tl.int32)
                    place = count + tl.cumsum(reaches, 0) - 1
                    mask = (reaches != 0) & (place < CANDIDATES)
                    tl.store(found_ptr + place, ids, mask=mask)
                    count += tl.sum(reaches, 0)
                tl.debug_barrier()  # other threads read what these wrote
            if is_filtered & (count <= CANDIDATES):
                threshold, ties = _threshold(
                    logits_ptr, found_ptr, count, top, inverse, k, top_p, total, True, BLOCK
                )
                token = _race(
                    logits_ptr, found_ptr, count, top, temperature, low, high, threshold, ties,
                    min_p, True, BLOCK,
                )  # fmt: skip
            else:
                threshold, ties = _threshold(
                    logits_ptr, found_ptr, vocab_size, top, inverse, k, top_p, total, False, BLOCK
                )
                token = _race(
                    logits_ptr, found_ptr, vocab_size, top, temperature, low, high, threshold,
                    ties, min_p, False, BLOCK,
                )  # fmt: skip
        tl.store(ids_ptr + draw, token)
        largest = tl.full([BLOCK], float("-inf"), tl.float32)
        mass = tl.zeros([BLOCK], tl.float32)
        for begin in tl.range(0, vocab_size, BLOCK):
            x = tl.load(raw_ptr + begin + lane, mask=begin + lane < vocab_size, other=float("-inf"))
            new = tl.maximum(largest, x)
            shift = tl.where(new == float("-inf"), 0.0, new)
            mass = mass * tl.exp(largest - shift) + tl.exp(x - shift)
            largest = new
        raw_top = tl.max(largest, 0)
        mass = tl.sum(mass * tl.exp(largest - raw_top), 0)
        logprob = tl.load(raw_ptr + token) - (raw_top + tl.log(mass))
        tl.store(logprobs_ptr + draw, logprob)
