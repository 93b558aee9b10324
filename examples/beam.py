"""Beam search: beams are forks, so the prompt is computed once however wide the beam."""

from __future__ import annotations

from cotrt import LLM, BeamSearchParams

PROMPT = "The three primary colors are"


def main() -> None:
    with LLM("smollm2-135m") as llm:
        [result] = llm.beam_search([PROMPT], BeamSearchParams(beam_width=4, max_tokens=12))
        print(PROMPT)
        for sequence in result.sequences:
            print(f"{sequence.score:8.4f}  {sequence.text!r}")
        print(f"{llm.metrics['prompt_tokens_computed']} prompt tokens computed")


if __name__ == "__main__":
    main()
