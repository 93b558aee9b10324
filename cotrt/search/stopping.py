"""When a vote may stop early: the posterior of the leader, and windows of equal answers."""

from __future__ import annotations

import functools
import math

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

# Below 1: what 10,000 draws of the worst case show stays under the promise, too.
_CAUTION = 0.9


@functools.lru_cache(maxsize=4096)
def posterior(lead: int, second: int) -> float:
    """P(the leader is likelier than the runner-up | their votes), with a uniform prior.

    The share of the leader among the two has the posterior Beta(lead + 1, second + 1); this is
    its mass above one half. ``posterior(4, 0) == 31/32``.
    """
    # The mass of a Beta with integer parameters is a binomial tail with p = 1/2.
    n = lead + second + 1
    if n < 1000:
        return float(sum(math.comb(n, k) for k in range(second + 1, n + 1)) / 2**n)
    return 0.5 * math.erfc(-(lead - second) / math.sqrt(2 * n))


@functools.lru_cache(maxsize=256)
def posterior_bar(num_votes: int, threshold: float) -> float:
    """The posterior at which a vote of at most `num_votes` may stop, `threshold` or a bit more.

    One who looks after every vote crosses a fixed threshold by luck more often than one who looks
    once: two equally likely answers and 39 votes cross 0.95 and then end otherwise in 5.8% of
    cases. The bar is raised just so far that in this worst case a stopped vote differs from the
    full one in at most ``0.9 * (1 - threshold)`` of cases. For 40 votes and 0.95 it is about
    0.965, which four equal votes still reach.
    """
    allowed = _CAUTION * (1 - threshold)
    low, high = threshold, 1.0
    if _share_that_differs(num_votes, low) <= allowed:
        return low
    for _ in range(16):
        middle = (low + high) / 2
        if _share_that_differs(num_votes, middle) <= allowed:
            high = middle
        else:
            low = middle
    return high


def _share_that_differs(num_votes: int, bar: float) -> float:
    """P(a vote stopped at `bar` has another leader than the full one), two equal answers.

    The first vote is for answer 0, which therefore wins ties. Index k of the arrays: answer 0 has
    k of the t votes so far.
    """
    live, for_0, for_1 = (np.zeros(num_votes + 1) for _ in range(3))
    live[1] = 1.0
    coins = np.zeros(num_votes + 2)  # of t + 1 fair coins, P(k heads)
    coins[:3] = 0.25, 0.5, 0.25
    votes = np.arange(num_votes + 1)
    for t in range(1, num_votes):
        # above[k] = P(more than k of t + 1 coins are heads): the posterior where the second has k.
        above = 1 - np.cumsum(coins)[: t + 1]
        lead_0 = votes[: t + 1]
        stops = (above[np.minimum(lead_0, t - lead_0)] > bar) & (2 * lead_0 != t)
        stopped = np.where(stops, live[: t + 1], 0.0)
        live[: t + 1] -= stopped
        for_0[: t + 1] += np.where(2 * lead_0 > t, stopped, 0.0)
        for_1[: t + 1] += np.where(2 * lead_0 < t, stopped, 0.0)
        live, for_0, for_1, coins = (_one_more(x) for x in (live, for_0, for_1, coins))
    tied = num_votes / 2
    return float(for_0[votes < tied].sum() + for_1[votes >= tied].sum())


def _one_more(x: Array) -> Array:
    half = x / 2
    half[1:] += x[:-1] / 2
    return half


def is_decided(lead: float, second: float, num_left: float) -> bool:
    """The votes that are left cannot change the leader."""
    return lead - second > num_left


def stops_by_posterior(lead: float, second: float, num_votes: int, threshold: float) -> bool:
    """Whether the leader's posterior is above the bar; weights count as whole votes, cautiously."""
    if lead <= second:
        return False
    a, b = math.floor(lead + 1e-9), math.ceil(second - 1e-9)
    return posterior(a, b) > posterior_bar(num_votes, threshold)
