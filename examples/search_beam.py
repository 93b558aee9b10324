"""Beam search over steps of reasoning; the tree is shown and saved as a page."""

from __future__ import annotations

import tempfile
from pathlib import Path

import cotrt
from cotrt import LLM, SamplingParams, search
from cotrt.viewer import save_html

QUESTION = "Which is heavier, a kilogram of iron or two kilograms of feathers? Explain in steps."


def main() -> None:
    with LLM("smollm2-135m", seed=2) as llm:
        result = cotrt.run(
            search.step_beam_search,
            llm,
            [{"role": "user", "content": QUESTION}],
            width=3,
            branching=2,
            delimiter="\n",
            max_steps=4,
            params=SamplingParams(temperature=0.9, max_tokens=40),
        )
        print(result.tree)
        print(f"\nfinished: {result.best.finished}, score {result.best.score:.3f}")
        page = save_html(result.tree, Path(tempfile.gettempdir()) / "beam.html")
        print(f"open {page.name} in the temporary folder to look around")


if __name__ == "__main__":
    main()
