"""Finds the likely tokens of a row without sorting the vocabulary.

A row is cut into blocks of 64 tokens, and each block's largest logit is kept. The k-th largest of
these is a bound below which none of the k largest logits lies (there are k tokens above it, one a
block), and a block whose largest is below a bound is never looked at again. What is left, some
hundred tokens in most rows, is sorted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

BLOCK = 64
# Elements of a softmax taken at once: larger ones leave the caches and make the system hand out
# and take back memory every time.
ELEMENTS_AT_ONCE = 1 << 21


@dataclass(slots=True)
class Candidates:
    """The tokens of each of D draws that reach its bound, likeliest first, ties by lowest id.

    Attributes:
        ids: int64 ``[D, C]``.
        logits: float32 ``[D, C]``; -inf after a draw's last candidate.
    """

    ids: torch.Tensor
    logits: torch.Tensor


class BlockedLogits:
    """Logits cut into blocks.

    Attributes:
        blocks: float32 ``[N * B, 64]``; -inf past the vocabulary.
        maxima: float32 ``[N, B]`` the largest of each block, NaN where it has one.
        top: float32 ``[N]`` the largest of each row.
        vocab_size: V.
    """

    def __init__(self, logits: torch.Tensor) -> None:
        num_rows, self.vocab_size = logits.shape
        assert logits.dtype == torch.float32, logits.dtype
        padding = -self.vocab_size % BLOCK
        if padding:
            logits = torch.nn.functional.pad(logits, (0, padding), value=-torch.inf)
        self.blocks = logits.contiguous().view(-1, BLOCK)
        self.maxima = self.blocks.amax(dim=1).view(num_rows, -1)
        self.top = self.maxima.amax(dim=1)

    @property
    def num_blocks(self) -> int:
        return self.maxima.shape[1]

    @property
    def matrix(self) -> torch.Tensor:
        """float32 ``[N, B * 64]``, a view."""
        return self.blocks.view(len(self.top), -1)

    def log_mass(self, rows: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
        """Log of the sum over the vocabulary of exp((logit - row's largest) / temperature).

        By way of softmax, whose one pass is faster than those of logsumexp: the probability of the
        likeliest token is the inverse of that sum.

        Args:
            rows: int64 ``[D]``.
            temperature: above 0.

        Returns:
            float32 ``[D]``.
        """
        parts = []
        for some in torch.split(rows, max(1, ELEMENTS_AT_ONCE // self.matrix.shape[1])):
            # A run of rows, as most are, is read in place.
            first, last = int(some[0]), int(some[-1])
            run = last - first + 1 == len(some) and bool((some.diff() == 1).all())
            values = self.matrix[first : last + 1] if run else self.matrix[some]
            if temperature != 1:
                values = (values - self.top[some, None]).mul_(1.0 / temperature)
            parts.append(torch.softmax(values, dim=1).amax(dim=1))
        most = torch.cat(parts)
        if most.device.type != "cpu":
            return most.log_().neg_()
        # One by one: torch's vector and scalar logarithms differ, and which a row gets would
        # depend on its place among the rows.
        return most.new_tensor([-math.log(x) for x in most.tolist()])

    def count_above(self, rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """int64 ``[D]``: how many logits of draw d's row are above ``values[d]``."""
        draw, block = self.blocks_reaching(rows, values)
        above = (self.gather(rows[draw], block) > values[draw, None]).sum(dim=1)
        return torch.zeros_like(rows).index_add_(0, draw, above)

    def argmax(self) -> torch.Tensor:
        """int64 ``[N]``: each row's likeliest token, the lowest id of equal ones."""
        block = self._first_block()
        inside = self.blocks.index_select(0, self._flat(block)).argmax(dim=1)
        return block * BLOCK + inside

    def best_blocks(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Each row's block with the likeliest token: first id int64 ``[N]``, logits ``[N, 64]``."""
        block = self._first_block()
        return block * BLOCK, self.blocks.index_select(0, self._flat(block))

    def blocks_reaching(
        self, rows: torch.Tensor, bound: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Blocks of draw d that may hold a logit of at least ``bound[d]``.

        Args:
            rows: int64 ``[D]`` each draw's row.
            bound: float32 ``[D]``.

        Returns:
            int64 ``[n]`` draws in ascending order, int64 ``[n]`` blocks, ascending in a draw.
        """
        draw, block = (self.maxima[rows] >= bound[:, None]).nonzero().unbind(1)
        return draw, block

    def gather(self, rows: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
        """Logits ``[n, 64]`` of blocks ``block[i]`` of rows ``rows[i]``."""
        return self.blocks.index_select(0, rows * self.num_blocks + block)

    def bound_of_top(self, rows: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """A logit that at least the ``k[d]`` likeliest tokens of draw d's row reach: ``[D]``."""
        most = int(k.max())
        if most <= self.num_blocks:
            largest = self.maxima.topk(most, dim=1).values
        else:
            largest = self.matrix.topk(min(most, self.matrix.shape[1]), dim=1).values
        return largest[rows, k.clamp(max=largest.shape[1]) - 1]

    def candidates(self, rows: torch.Tensor, bound: torch.Tensor) -> Candidates:
        """All tokens of draw d's row with a logit of at least ``bound[d]``, sorted."""
        num_draws = len(rows)
        draw, block = self.blocks_reaching(rows, bound)
        logits = self.gather(rows[draw], block)
        which, inside = ((logits >= bound[draw, None]) & (logits > -torch.inf)).nonzero().unbind(1)
        draws = draw[which]
        counts = torch.bincount(draws, minlength=num_draws)
        starts = counts.cumsum(0) - counts
        column = torch.arange(len(draws), device=rows.device) - starts[draws]
        width = max(1, int(counts.max())) if num_draws else 1
        packed = logits.new_full((num_draws, width), -torch.inf)
        ids = rows.new_zeros((num_draws, width))
        packed[draws, column] = logits[which, inside]
        ids[draws, column] = block[which] * BLOCK + inside
        packed, order = packed.sort(dim=1, descending=True, stable=True)
        return Candidates(ids.gather(1, order), packed)

    def _first_block(self) -> torch.Tensor:
        return self.maxima.argmax(dim=1)

    def _flat(self, block: torch.Tensor) -> torch.Tensor:
        return torch.arange(len(block), device=block.device) * self.num_blocks + block
