"""The likeliest next tokens of a sequence, for beam search: no draw, and no full sort."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from cotrt.engine.promise import Promise
from cotrt.options.sampling import SamplingParams
from cotrt.tree.schedule.work import Work
from cotrt.tree.sequence import Sequence as TokenSequence

if TYPE_CHECKING:
    import torch

    from cotrt.sampling.processors import LogitsProcessor

# A row's largest logits lie in those blocks of so many whose own largest are largest.
_BLOCK = 64

_GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Ranking:
    """The likeliest tokens after a sequence, best first; impossible ones are left out.

    Attributes:
        ids: int64 ``[n]``.
        logprobs: float32 ``[n]``, log-softmax of the logits divided by the temperature.
    """

    ids: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float32]


@dataclass(slots=True, eq=False)
class RankState:
    """One ranking of the tokens that may follow a sequence.

    To the sampler it is a greedy draw, whose token is not appended.

    Attributes:
        count: how many are wanted.
        temperature: divides the logits, above 0.
        promise: its value is the `Ranking`.
    """

    seq: TokenSequence
    count: int
    temperature: float
    promise: Promise = field(default_factory=Promise)
    work: Work | None = None
    params: SamplingParams = _GREEDY
    processor: LogitsProcessor | None = None
    seed: int = 0
    epoch: int = 0
    num_logprobs: int = -1
    release_when_done: bool = False


def rank(
    logits: torch.Tensor, rows: npt.NDArray[np.int32], states: Sequence[RankState]
) -> list[Ranking]:
    """Rank the tokens of some rows.

    Args:
        logits: float32 ``[R, V]``.
        rows: int32 ``[D]`` the row of each state.
        states: D of them.
    """
    import torch

    from cotrt.sampling.sampler import log_normalizers

    chosen = logits[torch.from_numpy(rows.astype(np.int64)).to(logits.device)]
    temperatures = [state.temperature for state in states]
    if any(value != 1.0 for value in temperatures):
        chosen /= torch.tensor(temperatures, device=chosen.device)[:, None]
    normalizers = log_normalizers(chosen)[:, None]
    num_rows, vocab_size = chosen.shape
    count = min(max(state.count for state in states), vocab_size)
    blocks = torch.nn.functional.pad(chosen, (0, -vocab_size % _BLOCK), value=-torch.inf)
    blocks = blocks.view(num_rows, -1, _BLOCK)
    best = blocks.amax(dim=2).topk(min(count, blocks.shape[1]), dim=1).indices
    some = blocks.gather(1, best[:, :, None].expand(-1, -1, _BLOCK)).flatten(1)
    values, places = some.topk(min(count, some.shape[1]), dim=1)
    ids = best.gather(1, places // _BLOCK) * _BLOCK + places % _BLOCK
    logprobs = (values - normalizers).cpu().numpy()
    found = ids.cpu().numpy()
    rankings = []
    for row, state in enumerate(states):
        keep = logprobs[row, : state.count] > -np.inf
        rankings.append(
            Ranking(found[row, : state.count][keep], logprobs[row, : state.count][keep])
        )
    return rankings
