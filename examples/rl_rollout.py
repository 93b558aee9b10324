"""Rollouts for a trainer: token ids, their log-probabilities, and which ones were sampled."""

from __future__ import annotations

import numpy as np

from cotrt import LLM, Branches

SHOTS = "1 + 2 = 3\n4 + 4 = 8\n2 + 5 = 7\n"
SUMS = ((3, 3), (4, 2), (5, 4))
GROUP = 8


def reward(text: str, answer: int) -> float:
    return float(text.strip() == str(answer))


def rows(group: Branches) -> list[dict[str, np.ndarray]]:
    """What a policy-gradient loss needs, with no text round trip: ids are the engine's own."""
    return [
        {
            "input_ids": np.array(branch.token_ids),
            "loss_mask": np.array(branch.sampled),
            "logprobs": np.array(
                [0.0 if value is None else value for value in branch.logprobs], np.float32
            ),
        }
        for branch in group
    ]


def main() -> None:
    with LLM("smollm2-135m", seed=3) as llm:
        shots = llm.branch(SHOTS)
        groups = [shots.fork(GROUP).extend(f"{a} + {b} =") for a, b in SUMS]
        everyone = Branches(branch for group in groups for branch in group)
        outputs = everyone.generate(max_tokens=4, stop="\n", temperature=1.0).result()

        for index, (group, (a, b)) in enumerate(zip(groups, SUMS, strict=True)):
            texts = [output.text for output in outputs[index * GROUP : (index + 1) * GROUP]]
            rewards = np.array([reward(text, a + b) for text in texts])
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
            batch = rows(group)
            assert all(len(row["input_ids"]) == len(row["loss_mask"]) for row in batch)
            num_sampled = sum(int(row["loss_mask"].sum()) for row in batch)
            print(
                f"{a} + {b}: mean reward {rewards.mean():.2f}, "
                f"advantages {advantages.min():+.2f} to {advantages.max():+.2f}, "
                f"{num_sampled} sampled tokens to learn from"
            )


if __name__ == "__main__":
    main()
