"""Rollouts for a trainer: token ids, their log-probabilities, and which ones were sampled."""

from __future__ import annotations

import numpy as np

from cotrt import LLM, Branches

PROMPTS = ("3 + 4 =", "9 - 5 =", "2 * 6 =")
ANSWERS = ("7", "4", "12")
GROUP = 8


def reward(text: str, answer: str) -> float:
    return float(text.split()[:1] == [answer])


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
        groups = [llm.branch(prompt).fork(GROUP) for prompt in PROMPTS]
        everyone = Branches(branch for group in groups for branch in group)
        outputs = everyone.generate(max_tokens=6, stop="\n", temperature=1.0).result()

        for index, (group, answer) in enumerate(zip(groups, ANSWERS, strict=True)):
            texts = [output.text for output in outputs[index * GROUP : (index + 1) * GROUP]]
            rewards = np.array([reward(text, answer) for text in texts])
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
            batch = rows(group)
            assert all(len(row["input_ids"]) == len(row["loss_mask"]) for row in batch)
            num_sampled = sum(int(row["loss_mask"].sum()) for row in batch)
            print(
                f"{PROMPTS[index]:8} mean reward {rewards.mean():.2f}, "
                f"advantages {advantages.min():+.2f} to {advantages.max():+.2f}, "
                f"{num_sampled} sampled tokens to learn from"
            )


if __name__ == "__main__":
    main()
