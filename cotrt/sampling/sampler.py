"""One pass from a step's logits to its tokens and their log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from cotrt.kernels.reference.candidates import BlockedLogits, Candidates
from cotrt.kernels.reference.sample import (
    MIN_TEMPERATURE,
    Draws,
    sample_filtered,
    sample_plain,
)

from .logprobs import TopLogprobs
from .noise import row_keys
from .processors import LogitsProcessor, apply_processors


@dataclass(slots=True)
class SamplingBatch:
    """One row a draw, S rows.

    Attributes:
        sample_rows: int32 ``[S]`` index into the logits rows; siblings share one.
        temperature: float32 ``[S]``; 0 is greedy.
        top_k: int32 ``[S]``; 0 is off.
        top_p: float32 ``[S]``; 1 is off.
        min_p: float32 ``[S]``; 0 is off.
        seeds: uint64 ``[S]``, with epochs and positions the key of the draw.
        epochs: uint32 ``[S]``.
        positions: int64 ``[S]`` absolute position of the token that is drawn.
        processors: a bound processor or None a draw; None where no draw has one.
        num_logprobs: int32 ``[S]``: -1 for the sampled token's logprob alone; n for its rank and
            the n likeliest tokens as well.
        processed_logprobs: logprobs are of the distribution drawn from (at temperature 1 for a
            greedy draw) and not of the raw logits.
    """

    sample_rows: npt.NDArray[np.int32]
    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int32]
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]
    seeds: npt.NDArray[np.uint64]
    epochs: npt.NDArray[np.uint32]
    positions: npt.NDArray[np.int64]
    processors: Sequence[LogitsProcessor | None] | None
    num_logprobs: npt.NDArray[np.int32]
    processed_logprobs: bool = False


@dataclass(slots=True)
class SampleOutput:
    """What was drawn.

    Attributes:
        token_ids: int32 ``[S]``; -1 in bad rows.
        logprobs: float32 ``[S]``; NaN in bad rows.
        bad: bool ``[S]``: logits that hold NaN or +inf, or leave no token possible.
        top: by draw, for those that asked for it.
    """

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    bad: npt.NDArray[np.bool_]
    top: dict[int, TopLogprobs] = field(default_factory=dict)


class SampleKernel(Protocol):
    """A backend's own sampling: `cotrt.kernels.cpu.sample.sample` has the contract."""

    def __call__(
        self,
        logits: torch.Tensor,
        rows: npt.NDArray[np.int32],
        temperature: npt.NDArray[np.float32],
        top_k: npt.NDArray[np.int32],
        top_p: npt.NDArray[np.float32],
        min_p: npt.NDArray[np.float32],
        key_low: npt.NDArray[np.uint32],
        key_high: npt.NDArray[np.uint32],
        *,
        raw: torch.Tensor | None = None,
        raw_rows: npt.NDArray[np.int32] | None = None,
    ) -> tuple[Any, Any, Any]:
        """Token ids int32 ``[D]``, logprobs float32 ``[D]``, bad bool ``[D]``: numpy or tensors.

        A kernel that `takes_edits` has an argument ``edits``: a processor or None a draw.
        """


def kernel_for(backend_name: str) -> SampleKernel | None:
    """The sampling kernel of a backend, or None where it draws by the reference."""
    if backend_name != "cpu":
        return None
    from cotrt.kernels.cpu.sample import sample

    return sample


def sample_batch(
    logits: torch.Tensor, batch: SamplingBatch, kernel: SampleKernel | None = None
) -> SampleOutput:
    """Draws every row of the batch.

    Args:
        logits: float32 ``[R, V]``, never changed.
        batch: the draws.
        kernel: draws in place of the reference; processed logprobs are the reference's always.
    """
    if kernel is not None and not batch.processed_logprobs:
        return _sample_natively(logits, batch, kernel)
    num_draws = len(batch.sample_rows)
    output = _no_output(num_draws)
    if not num_draws:
        return output
    raw = BlockedLogits(logits)
    finite = torch.isfinite(raw.top).cpu().numpy()[batch.sample_rows]
    processors = batch.processors or [None] * num_draws
    plain = [i for i in range(num_draws) if finite[i] and processors[i] is None]
    changed = [i for i in range(num_draws) if finite[i] and processors[i] is not None]
    output.bad[:] = ~finite
    rows = batch.sample_rows.astype(np.int64)
    if plain:
        index = np.array(plain)
        _draw(raw, raw, rows[index], index, batch, output)
    if changed:
        index = np.array(changed)
        bound = [p for i in changed if (p := processors[i]) is not None]
        source = logits[torch.from_numpy(rows[index]).to(logits.device)]
        blocked = BlockedLogits(_processed(source, bound))
        possible = torch.isfinite(blocked.top).cpu().numpy()
        output.bad[index[~possible]] = True
        if possible.any():
            own = np.arange(len(index))[possible]
            given = blocked if batch.processed_logprobs else BlockedLogits(source)
            _draw(blocked, given, own, index[possible], batch, output)
    return output


def samples_on_device(batch: SamplingBatch, kernel: SampleKernel) -> bool:
    """Whether the draws need nothing of the host.

    That is no top logprobs, and no processor but for penalties and biases that the kernel counts.
    """
    if batch.processed_logprobs or bool((batch.num_logprobs >= 0).any()):
        return False
    if batch.processors is None:
        return True
    counts = getattr(kernel, "takes_edits", False)
    return counts and all(p is None or p.only_edits for p in batch.processors)


def sample_on_device(
    logits: torch.Tensor, batch: SamplingBatch, kernel: SampleKernel
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `kernel` draws, left where it is.

    Args:
        batch: one that `samples_on_device`; steps that only lengthen each other have the same
            list of processors.

    Returns:
        As of the kernel: token ids, logprobs and bad rows.
    """
    low, high = row_keys(batch.seeds, batch.epochs, batch.positions)
    edits = {} if batch.processors is None else {"edits": batch.processors}
    draw: Any = kernel
    ids, logprobs, bad = draw(
        logits, batch.sample_rows, batch.temperature, batch.top_k, batch.top_p, batch.min_p,
        low, high, raw=logits, raw_rows=batch.sample_rows, **edits,
    )  # fmt: skip
    return ids, logprobs, bad


def _sample_natively(
    logits: torch.Tensor, batch: SamplingBatch, kernel: SampleKernel
) -> SampleOutput:
    num_draws = len(batch.sample_rows)
    low, high = row_keys(batch.seeds, batch.epochs, batch.positions)

    def draw(
        matrix: torch.Tensor,
        rows: npt.NDArray[np.int32],
        raw: torch.Tensor,
        chosen: npt.NDArray[np.bool_],
    ) -> None:
        output.token_ids[chosen], output.logprobs[chosen], output.bad[chosen] = kernel(
            matrix, rows, batch.temperature[chosen], batch.top_k[chosen], batch.top_p[chosen],
            batch.min_p[chosen], low[chosen], high[chosen], raw=raw, raw_rows=rows,
        )  # fmt: skip

    output = _no_output(num_draws)
    processors = batch.processors or [None] * num_draws
    changed = np.array([p is not None for p in processors], np.bool_)
    if not changed.all():
        draw(logits, batch.sample_rows[~changed], logits, ~changed)
    if changed.any():
        changed_rows = torch.from_numpy(batch.sample_rows[changed].astype(np.int64))
        source = logits[changed_rows.to(logits.device)]
        processed = _processed(source, [p for p in processors if p is not None])
        draw(processed, np.arange(len(source), dtype=np.int32), source, changed)
        # A row whose NaN is masked out is bad as well.
        output.bad |= np.isnan(output.logprobs)
        output.token_ids[output.bad] = -1
    asked = ((batch.num_logprobs >= 0) & ~output.bad).nonzero()[0]
    if len(asked):
        at = torch.from_numpy(batch.sample_rows[asked].astype(np.int64)).to(logits.device)
        ids = torch.from_numpy(output.token_ids[asked].astype(np.int64)).to(logits.device)
        _, top = token_logprobs(logits, at, ids, batch.num_logprobs[asked])
        output.top = {int(asked[i]): entry for i, entry in top.items()}
    return output


def _no_output(num_draws: int) -> SampleOutput:
    return SampleOutput(
        np.full(num_draws, -1, np.int32),
        np.full(num_draws, np.nan, np.float32),
        np.zeros(num_draws, np.bool_),
    )


def _processed(source: torch.Tensor, processors: list[LogitsProcessor]) -> torch.Tensor:
    """A changed copy. Bans that would leave a row no token at all are lifted for this draw."""
    processed = source.clone()
    apply_processors(processed, processors)
    if any(len(p.rules.bad_ids) or p.rules.bad_sequences or p.rules.min_tokens for p in processors):
        empty = (processed.amax(dim=1) == -torch.inf).nonzero().squeeze(1)
        if len(empty):
            again = source[empty]
            apply_processors(again, [processors[i] for i in empty.tolist()], ban=False)
            processed[empty] = again
    return processed


def _draw(
    blocked: BlockedLogits,
    raw: BlockedLogits,
    rows: npt.NDArray[np.int64],
    index: npt.NDArray[np.int64],
    batch: SamplingBatch,
    output: SampleOutput,
) -> None:
    """Draws some of a batch's rows.

    Args:
        blocked: the logits to draw from.
        raw: those whose logprobs are given, with the same rows.
        rows: int64 ``[D]`` row of these of each draw.
        index: int64 ``[D]`` place of each draw in the batch.
        batch: all draws.
        output: where the results go.
    """
    device = blocked.top.device
    ids = torch.empty(len(index), dtype=torch.int64, device=device)
    greedy = batch.temperature[index] == 0
    if greedy.any():
        at = torch.from_numpy(rows[greedy]).to(device)
        ids[torch.from_numpy(greedy).to(device)] = blocked.argmax()[at]
    filtered = ~greedy & is_filtered(batch, index, blocked.vocab_size)
    plain = ~(greedy | filtered)
    if plain.any():
        draws = _draws(batch, rows[plain], index[plain], device)
        ids[torch.from_numpy(plain).to(device)] = sample_plain(blocked, draws)
    candidates = None
    if filtered.any():
        draws = _draws(batch, rows[filtered], index[filtered], device)
        found, candidates = sample_filtered(blocked, draws)
        ids[torch.from_numpy(filtered).to(device)] = found
    output.token_ids[index] = ids.cpu().numpy()
    row_tensor = torch.from_numpy(rows).to(device)
    if batch.processed_logprobs:
        kept = (filtered.nonzero()[0], candidates)
        raw = _distributions(blocked, rows, batch.temperature[index], *kept)
        row_tensor = torch.arange(len(index), device=device)
    found_logprobs, top = token_logprobs(raw, row_tensor, ids, batch.num_logprobs[index])
    output.logprobs[index] = found_logprobs
    output.top.update({int(index[draw]): entry for draw, entry in top.items()})


def _draws(
    batch: SamplingBatch,
    rows: npt.NDArray[np.int64],
    index: npt.NDArray[np.int64],
    device: torch.device,
) -> Draws:
    low, high = row_keys(batch.seeds[index], batch.epochs[index], batch.positions[index])

    def tensor(array: npt.NDArray[Any], dtype: type[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array.astype(dtype)).to(device)

    return Draws(
        rows=tensor(rows, np.int64),
        temperature=tensor(batch.temperature[index], np.float64).clamp_(min=MIN_TEMPERATURE),
        top_k=tensor(batch.top_k[index], np.int64),
        top_p=tensor(batch.top_p[index], np.float64),
        min_p=tensor(batch.min_p[index], np.float64),
        key_low=tensor(low.view(np.int32), np.int32),
        key_high=tensor(high.view(np.int32), np.int32),
    )


def is_filtered(
    batch: SamplingBatch, index: npt.NDArray[np.int64], vocab_size: int
) -> npt.NDArray[np.bool_]:
    """Draws for which top-k, top-p or min-p may leave tokens out: bool ``[D]``."""
    top_k = batch.top_k[index]
    by_k = (top_k > 0) & (top_k < vocab_size)
    return by_k | (batch.top_p[index] < 1) | (batch.min_p[index] > 0)


def _distributions(
    logits: BlockedLogits,
    rows: npt.NDArray[np.int64],
    temperature: npt.NDArray[np.float32],
    filtered: npt.NDArray[np.int64],
    candidates: Candidates | None,
) -> BlockedLogits:
    """The distributions drawn from, one row a draw: filtered, and divided by temperature."""
    result = logits.matrix[torch.from_numpy(rows).to(logits.top.device)]
    if candidates is not None:
        for draw, ids, values in zip(filtered, candidates.ids, candidates.logits, strict=True):
            kept = values > -torch.inf
            result[draw].fill_(-torch.inf)[ids[kept]] = values[kept]
    divisor = np.where(temperature == 0, 1, np.maximum(temperature, MIN_TEMPERATURE))
    result.div_(torch.from_numpy(divisor.astype(np.float32)).to(result.device)[:, None])
    return BlockedLogits(result)


def log_normalizers(logits: torch.Tensor) -> torch.Tensor:
    """Log of the sum of exponentials of each row of float32 ``[R, V]``."""
    blocked = BlockedLogits(logits)
    return blocked.top + blocked.log_mass(torch.arange(len(logits), device=logits.device))


def token_logprobs(
    logits: BlockedLogits | torch.Tensor,
    rows: torch.Tensor,
    token_ids: torch.Tensor,
    num_logprobs: npt.NDArray[np.int32],
) -> tuple[npt.NDArray[np.float32], dict[int, TopLogprobs]]:
    """Log-softmax of given tokens, and the likeliest ones where asked: also for scores and prompts.

    Args:
        logits: float32 ``[R, V]``, or these in blocks.
        rows: int64 ``[D]`` row of each token.
        token_ids: int64 ``[D]``.
        num_logprobs: int32 ``[D]``; -1 for neither rank nor the likeliest.

    Returns:
        float32 ``[D]`` logprobs (NaN where the row holds NaN), and by d what else was asked for.
    """
    if not isinstance(logits, BlockedLogits):
        logits = BlockedLogits(logits)
    if not len(rows):
        return np.empty(0, np.float32), {}
    distinct, inverse = (rows, None) if _ascends(rows) else torch.unique(rows, return_inverse=True)
    normalizer = logits.top[distinct] + logits.log_mass(distinct)
    normalizer = normalizer if inverse is None else normalizer[inverse]
    values = logits.matrix[rows, token_ids]
    logprobs = (values - normalizer).cpu().numpy()
    asked = (num_logprobs >= 0).nonzero()[0]
    if not len(asked):
        return logprobs, {}
    at = torch.from_numpy(asked).to(rows.device)
    counts = torch.from_numpy(num_logprobs[asked].astype(np.int64)).to(rows.device)
    ranks = (logits.count_above(rows[at], values[at]) + 1).tolist()
    bound = logits.bound_of_top(rows[at], counts.clamp(min=1))
    likeliest = logits.candidates(rows[at], bound)
    width = max(1, int(counts.max()))
    others = (likeliest.logits[:, :width] - normalizer[at, None]).cpu().numpy()
    ids = likeliest.ids[:, :width].cpu().numpy()
    possible = (likeliest.logits[:, :width] > -torch.inf).sum(dim=1).tolist()
    top: dict[int, TopLogprobs] = {}
    for i, draw in enumerate(asked.tolist()):
        n = min(int(num_logprobs[draw]), possible[i])
        top[draw] = TopLogprobs(ids[i, :n].copy(), others[i, :n].copy(), ranks[i])
    return logprobs, top


def _ascends(rows: torch.Tensor) -> bool:
    return len(rows) == 1 or bool((rows.diff() > 0).all())
