"""Choose: the likeliest of a few options, scored in one batch over the shared text."""

from __future__ import annotations

from cotrt import LLM

REVIEWS = (
    "I loved every minute of it.",
    "A waste of time and money.",
    "The best film of the year.",
    "Dull, slow and badly acted.",
)
SHOTS = """\
Review: What a wonderful surprise! Sentiment: positive
Review: I want my money back. Sentiment: negative
"""


def main() -> None:
    with LLM("smollm2-135m") as llm:
        shots = llm.branch(SHOTS)
        with shots.fork(len(REVIEWS)) as branches:
            for branch, review in zip(branches, REVIEWS, strict=True):
                branch.extend(f"Review: {review} Sentiment:", special=False)
            choices = branches.choose([" positive", " negative"]).result()
            for review, choice in zip(REVIEWS, choices, strict=True):
                margin = abs(choice.scores[0].mean - choice.scores[1].mean)
                print(f"{choice.option.strip():9} (by {margin:.2f})  {review}")

            # The option is part of the branch now, and can be built upon.
            branches.extend(". Reason:")
            reasons = branches.generate(max_tokens=16, stop="\n", temperature=0.0).result()
            print(f"\nReason for the first:{reasons[0].text}")


if __name__ == "__main__":
    main()
