"""Self-consistency: one prompt, sixteen samples by fork, and a vote over their answers."""

from __future__ import annotations

import re
from collections import Counter

from cotrt import LLM

PROMPT = """\
Question: Tom has 2 bags with 5 marbles each. How many marbles does he have?
Answer: 2 bags of 5 marbles are 2 * 5 = 10 marbles. The answer is 10.

Question: A shelf holds 7 books. 3 are taken away. How many are left?
Answer: 7 books less 3 books are 7 - 3 = 4 books. The answer is 4.

Question: Mia buys 3 packs of 4 pencils. How many pencils does she have?
Answer:"""


def answer_of(text: str) -> str | None:
    """The number after "The answer is", if the sample got that far."""
    found = re.search(r"The answer is (-?\d+)", text)
    return found.group(1) if found else None


def main() -> None:
    with LLM("smollm2-135m", seed=1) as llm:
        root = llm.branch(PROMPT)
        with root.fork(16) as samples:
            outputs = samples.generate(max_tokens=48, stop="\n", temperature=0.7).result()
            votes = Counter(answer_of(output.text) for output in outputs)

        for answer, count in votes.most_common():
            print(f"{count:3} x {answer or 'no answer'}")
        votes.pop(None, None)
        print("the vote:", votes.most_common(1)[0][0] if votes else "nobody answered")
        print(
            f"the prompt of {len(root)} tokens was computed once: "
            f"{llm.metrics['prompt_tokens_computed']} prompt tokens computed, "
            f"{llm.metrics['generated_tokens']} tokens generated"
        )


if __name__ == "__main__":
    main()
