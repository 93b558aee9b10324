"""Draws tokens from logits: greedy, or by Gumbel noise over what the filters leave.

The sampled token has the largest ``logit / temperature + noise`` of the tokens that survive
top-k, then top-p, then min-p; ties go to the lowest id. The noise is a hash of (draw key, token
id), see `cotrt.sampling.noise`, and bounded, so a token too far below the best one is never given
any. Scores that decide are float64; everything before only leaves out what cannot win.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .candidates import BLOCK, BlockedLogits, Candidates

MAX_GUMBEL = 16.6356
GOLDEN, MULTIPLY_1, MULTIPLY_2 = 0x9E3779B9, 0x7FEB352D, 0x846CA68B
# Blocks that are hashed at once: 1 M tokens, so that the work stays in the caches.
CHUNK = 1 << 14
# Draws whose filters may leave the whole vocabulary are taken so many tokens at a time.
MAX_CANDIDATES = 1 << 23
# Smaller temperatures count as this one: their inverse would leave float32.
MIN_TEMPERATURE = 1e-6
# How much a float32 race value may be wrong, as a factor.
SLACK = 1.001


@dataclass(slots=True)
class Draws:
    """D draws by noise; tensors lie where the logits do.

    Attributes:
        rows: int64 ``[D]`` rows of the logits.
        temperature: float64 ``[D]``, at least ``MIN_TEMPERATURE``.
        top_k: int64 ``[D]``, 0 for off.
        top_p: float64 ``[D]``.
        min_p: float64 ``[D]``.
        key_low: int32 ``[D]`` the bits of the draw's key, low half.
        key_high: int32 ``[D]`` high half.
    """

    rows: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    key_low: torch.Tensor
    key_high: torch.Tensor

    def select(self, index: torch.Tensor) -> Draws:
        return Draws(*(getattr(self, name)[index] for name in self.__slots__))


def noise_bits(low: torch.Tensor, high: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """32 random bits a token as int32; equal to `cotrt.sampling.noise.noise_bits` bit for bit.

    Args:
        low: int32, the low half of a draw's key.
        high: int32, the high half.
        ids: int32 token ids; all three broadcast.
    """
    # int32 shifts carry the sign in from the left: a mask takes it out again.
    bits = ids * _signed(GOLDEN) + low
    bits = bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF)).mul_(_signed(MULTIPLY_1))
    bits = bits.bitwise_xor_((bits >> 15).bitwise_and_(0x1FFFF)).bitwise_xor_(high)
    bits = bits.mul_(_signed(MULTIPLY_2))
    return bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF))


def gumbel(bits: torch.Tensor) -> torch.Tensor:
    """Gumbel noise of the bits, float64."""
    uniform = ((bits >> 9) & 0x7FFFFF).double().add_(0.5).mul_(2.0**-23)
    return uniform.log_().neg_().log_().neg_()


def sample_plain(logits: BlockedLogits, draws: Draws) -> torch.Tensor:
    """Draws one token each without filters: int64 ``[D]``.

    Only tokens within the noise's bound of a first guess are hashed at all.

    In terms of exponentials, token i beats score s when ``-log(u_i) < exp(logit_i / t - s)``, and
    ``1 - u_i <= -log(u_i)``: an integer comparison and one exp find the few that may win, and
    these are scored in full.
    """
    rows, top = draws.rows, logits.top[draws.rows]
    first, block = logits.best_blocks()
    first, block = first[rows], block[rows]
    lanes = torch.arange(BLOCK, device=rows.device)
    guess = _scores(draws, first[:, None] + lanes, block, top).amax(dim=1)
    # Nothing this far below the best logit can reach the guess, however lucky.
    reach = (guess - MAX_GUMBEL - 1e-3) * draws.temperature
    bound = (top.double() + reach - reach.abs() * 1e-6 - top.abs() * 1e-6).float()
    draw, at = logits.blocks_reaching(rows, bound)
    # 1 - u = (complement + 1/2) / 2^23 where complement is the noise's top 23 bits, flipped.
    offset = (math.log(SLACK * 2**23) - guess).float()
    inverse = (1.0 / draws.temperature).float()
    survivors = []
    for begin in range(0, len(draw), CHUNK):
        d, b = draw[begin : begin + CHUNK], at[begin : begin + CHUNK]
        values = logits.gather(rows[d], b)
        ids = (b[:, None] * BLOCK + lanes).to(torch.int32)
        bits = noise_bits(draws.key_low[d, None], draws.key_high[d, None], ids)
        complement = bits.bitwise_not_().bitwise_right_shift_(9).bitwise_and_(0x7FFFFF)
        race = (values - top[d, None]).mul_(inverse[d, None]).add_(offset[d, None]).exp_()
        i, lane = (complement.float() <= race).nonzero().unbind(1)
        survivors.append((d[i], b[i] * BLOCK + lane, values[i, lane]))
    draw, ids, values = (torch.cat(parts) for parts in zip(*survivors, strict=True))
    return _winners(draws, draw, ids, values, top)


def _winners(
    draws: Draws, draw: torch.Tensor, ids: torch.Tensor, values: torch.Tensor, top: torch.Tensor
) -> torch.Tensor:
    """The best-scoring token of each draw among a flat list of survivors."""
    bits = noise_bits(draws.key_low[draw], draws.key_high[draw], ids.to(torch.int32))
    scaled = (values.double() - top[draw].double()) / draws.temperature[draw]
    scores = scaled + gumbel(bits)
    best = scores.new_full((len(top),), -torch.inf).scatter_reduce_(0, draw, scores, "amax")
    ids = torch.where(scores == best[draw], ids, torch.iinfo(torch.int64).max)
    winners = torch.full_like(draws.rows, torch.iinfo(torch.int64).max)
    return winners.scatter_reduce_(0, draw, ids, "amin")


def _scores(
    draws: Draws, ids: torch.Tensor, values: torch.Tensor, top: torch.Tensor
) -> torch.Tensor:
    """float64 ``[D, C]``: (logit - row's largest) / temperature + noise."""
    bits = noise_bits(draws.key_low[:, None], draws.key_high[:, None], ids.to(torch.int32))
    return _scaled(draws, values, top) + gumbel(bits)


def _scaled(draws: Draws, values: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    return (values.double() - top.double()[:, None]) / draws.temperature[:, None]


def sample_filtered(logits: BlockedLogits, draws: Draws) -> tuple[torch.Tensor, Candidates]:
    """Draws one token each from what the filters leave.

    Args:
        logits: rows whose largest logit is finite.
        draws: the draws; a draw's filters may all be off.

    Returns:
        int64 ``[D]`` token ids, and what they were drawn from: candidates whose logits are -inf
        where a filter cut them.
    """
    parts: list[tuple[torch.Tensor, Candidates]] = []
    ids = torch.empty_like(draws.rows)
    every = torch.arange(len(ids), device=ids.device)
    for some in torch.split(every, max(1, MAX_CANDIDATES // logits.vocab_size)):
        part = draws if len(some) == len(ids) else draws.select(some)
        ids[some], candidates = _sample_filtered(logits, part)
        parts.append((some, candidates))
    return ids, _joined(parts, len(ids))


def _sample_filtered(logits: BlockedLogits, draws: Draws) -> tuple[torch.Tensor, Candidates]:
    num_draws = len(draws.rows)
    top = logits.top[draws.rows]
    by_k = (draws.top_k > 0) & (draws.top_k < logits.vocab_size)
    by_p = (draws.top_p < 1) & ~by_k
    # Mass is relative to the likeliest token's; with top-k it is that of the k kept ones.
    total = torch.zeros(num_draws, dtype=torch.float64, device=top.device)
    if bool(by_p.any()):
        total[by_p] = _row_mass(logits, draws.select(by_p))
    found = torch.empty_like(draws.rows)
    parts: list[tuple[torch.Tensor, Candidates]] = []
    todo = [torch.arange(num_draws, device=top.device)]
    # Tokens less likely than (1 - p) / 1000 are seldom in the set; those less likely than
    # (1 - p) / V never are, for all of them together do not make 1 - p.
    for share in (1000.0, float(logits.vocab_size), math.inf):
        left = []
        for picked in todo:
            part = draws if len(picked) == num_draws else draws.select(picked)
            bound = _bound(logits, part, by_k[picked], by_p[picked], total[picked], share)
            candidates = logits.candidates(part.rows, bound)
            weights = torch.exp(_scaled(part, candidates.logits, top[picked]))
            reached = weights.sum(dim=1) >= part.top_p * total[picked]
            # Where min-p cuts higher than the bound of top-p, all that it leaves is here.
            limited = part.min_p > total[picked] * (1 - part.top_p) / share
            complete = ~by_p[picked] | reached | limited | (share == math.inf)
            left.append(picked[~complete])
            done = complete.nonzero().squeeze(1)
            if len(done):
                if len(done) < len(picked):
                    part, weights, picked = part.select(done), weights[done], picked[done]
                    candidates = Candidates(candidates.ids[done], candidates.logits[done])
                sums = torch.where(by_p[picked], total[picked], 0.0)
                found[picked] = _draw(part, candidates, weights, sums, top[picked])
                parts.append((picked, candidates))
        # What grows may grow to the whole vocabulary: a few draws at a time.
        few = max(1, MAX_CANDIDATES // 8 // logits.vocab_size)
        grown = torch.cat(left) if left else draws.rows[:0]
        todo = [part for part in torch.split(grown, few) if len(part)]
    return found, _joined(parts, num_draws)


def _bound(
    logits: BlockedLogits,
    draws: Draws,
    by_k: torch.Tensor,
    by_p: torch.Tensor,
    total: torch.Tensor,
    share: float,
) -> torch.Tensor:
    """float32 ``[D]``: a logit that every token reaches that the filters may keep."""
    top = logits.top[draws.rows].double()
    scaled = torch.full_like(top, -torch.inf)
    if share < math.inf:
        scaled = torch.where(by_p, (total * (1 - draws.top_p) / share).log(), scaled)
    scaled = torch.where(by_k, scaled, torch.maximum(scaled, draws.min_p.log()))
    # Room for the rounding of logits and of the division by temperature.
    bound = top + scaled * draws.temperature * (1 + 1e-6) - top.abs() * 1e-6 - 1e-6
    bound = bound.float()
    if bool(by_k.any()):
        bound[by_k] = logits.bound_of_top(draws.rows[by_k], draws.top_k[by_k])
    return bound


def _draw(
    draws: Draws,
    candidates: Candidates,
    weights: torch.Tensor,
    total: torch.Tensor,
    top: torch.Tensor,
) -> torch.Tensor:
    """Applies the filters to sorted candidates (cut ones become -inf) and draws from the rest."""
    num_candidates = weights.shape[1]
    k = torch.where(draws.top_k > 0, draws.top_k, num_candidates)
    rank = torch.arange(num_candidates, device=k.device)
    weights = weights.masked_fill(rank >= k[:, None], 0.0)
    total = torch.where(total > 0, total, weights.sum(dim=1))
    before = weights.cumsum(dim=1) - weights
    keep = (draws.top_p[:, None] >= 1) | (before < draws.top_p[:, None] * total[:, None])
    keep &= weights >= draws.min_p[:, None] * weights[:, :1]
    keep |= rank == 0  # a top_p that is 0 in float32 keeps the likeliest token
    keep &= (rank < k[:, None]) & (candidates.logits > -torch.inf)
    candidates.logits.masked_fill_(~keep, -torch.inf)
    scores = _scores(draws, candidates.ids, candidates.logits, top)
    best = scores == scores.amax(dim=1, keepdim=True)
    return torch.where(best, candidates.ids, torch.iinfo(torch.int64).max).amin(dim=1)


def _row_mass(logits: BlockedLogits, draws: Draws) -> torch.Tensor:
    """float64 ``[D]``: sum over the vocabulary of exp((logit - largest) / temperature)."""
    masses = torch.empty(len(draws.rows), dtype=torch.float64, device=draws.rows.device)
    # One pass for all draws of a temperature, commonly all of them.
    for temperature in torch.unique(draws.temperature).tolist():
        chosen = (draws.temperature == temperature).nonzero().squeeze(1)
        rows, inverse = torch.unique(draws.rows[chosen], return_inverse=True)
        masses[chosen] = logits.log_mass(rows, temperature).double().exp_()[inverse]
    return masses


def _joined(parts: list[tuple[torch.Tensor, Candidates]], num_draws: int) -> Candidates:
    """Candidates of all draws in their order, from those of parts of them."""
    if len(parts) == 1 and len(parts[0][0]) == num_draws:
        return parts[0][1]
    width = max(candidates.ids.shape[1] for _, candidates in parts)
    first = parts[0][1]
    ids = first.ids.new_zeros((num_draws, width))
    logits = first.logits.new_full((num_draws, width), -torch.inf)
    for draws, candidates in parts:
        ids[draws, : candidates.ids.shape[1]] = candidates.ids
        logits[draws, : candidates.logits.shape[1]] = candidates.logits
    return Candidates(ids, logits)


def _signed(value: int) -> int:
    """A 32-bit pattern as torch's int32 writes it."""
    return value - (1 << 32) if value >= 1 << 31 else value
