"""How often a vote that stops early differs from the full one, and what it saves.

    python scripts/search/early_stopping.py

10,000 streams of votes for each distribution; prints the table of docs/search.md.
"""

from __future__ import annotations

import numpy as np

from cotrt.search.stopping import posterior, posterior_bar

STREAMS = {
    "1/2, 1/2": [0.5, 0.5],
    "0.55, 0.45": [0.55, 0.45],
    "0.7, 0.3": [0.7, 0.3],
    "0.9, 0.1": [0.9, 0.1],
    "0.4, 0.3, 0.3": [0.4, 0.3, 0.3],
    "five of 0.2": [0.2] * 5,
    "0.3 and seven of 0.1": [0.3] + [0.1] * 7,
    "0.5 and ten of 0.05": [0.5] + [0.05] * 10,
    "ten, as 1/k": [1 / k for k in range(1, 11)],
}
NUM_STREAMS = 10_000


def simulate(shares: list[float], n: int, rule: str, seed: int) -> tuple[float, float]:
    """Share of votes that end otherwise than the full one, and mean votes used."""
    rng = np.random.default_rng(seed)
    p = np.array(shares) / sum(shares)
    draws = rng.choice(len(p), size=(NUM_STREAMS, n), p=p)
    bar = posterior_bar(n, 0.95)
    table = np.array(
        [[a > b and posterior(a, b) > bar for b in range(n + 1)] for a in range(n + 1)]
    )
    counts = np.zeros((NUM_STREAMS, len(p)), int)
    first = np.full((NUM_STREAMS, len(p)), n)
    rows = np.arange(NUM_STREAMS)
    used, decision = np.full(NUM_STREAMS, n), np.full(NUM_STREAMS, -1)
    for t in range(n):
        vote = draws[:, t]
        counts[rows, vote] += 1
        first[rows, vote] = np.minimum(first[rows, vote], t)
        order = np.argsort(counts * (n + 1) - first, axis=1)  # ties: the one seen first
        lead, second = order[:, -1], order[:, -2]
        a, b = counts[rows, lead], counts[rows, second]
        if rule == "posterior":
            stops = table[a, b] | (a - b > n - 1 - t)
        else:
            stops = np.zeros(NUM_STREAMS, bool)
            if t >= 4:
                stops = (draws[:, t - 4 : t + 1] == vote[:, None]).all(axis=1)
        new = (decision < 0) & (stops | (t == n - 1))
        decision[new], used[new] = lead[new], t + 1
    return float(np.mean(decision != lead)), float(used.mean())


def main() -> None:
    print("| answers' shares | n | posterior differs | votes used | window differs | votes used |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, shares in STREAMS.items():
        for n in (16, 40):
            cells = [simulate(shares, n, rule, seed=n) for rule in ("posterior", "window")]
            text = " | ".join(f"{100 * differs:.2f}% | {used:.1f}" for differs, used in cells)
            print(f"| {name} | {n} | {text} |")


if __name__ == "__main__":
    main()
