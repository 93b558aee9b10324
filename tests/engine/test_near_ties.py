"""Without deterministic=True greedy texts agree with solo runs, but where logits nearly tie."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "search"))
from starter import NEAR_TIE, least_equal, starter_llm

from cotrt import SamplingParams

NUM_TOKENS = 40
QUESTIONS = [
    "What is the capital of France?",
    "Tell me a joke about a cat.",
    "List three prime numbers.",
    "Why is the sky blue?",
    "Write a sentence about the sea.",
    "How do plants make food?",
    "What is 12 times 12?",
    "Name a famous painter and one of their works.",
]


def answers(llm: Any, prompts: list[list[int]], together: bool) -> list[Any]:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)
    batches = [prompts] if together else [[p] for p in prompts]
    outs = [out for batch in batches for out in llm.generate(batch, params, use_tqdm=False)]
    return [out.outputs[0] for out in outs]


def prompts_of(llm: Any) -> list[list[int]]:
    long = "Answer as briefly as you can. " * 40  # more than a chunk of 256 tokens
    texts = list(QUESTIONS) + [f"{long}{q}" for q in QUESTIONS]
    return [llm.tokenizer.encode(text) for text in texts]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 97}, {"block_size": 64}])
def test_texts_part_at_near_ties_only(options: dict[str, Any]) -> None:
    with starter_llm(dtype="bfloat16", enable_prefix_caching=False) as llm:
        prompts = prompts_of(llm)
        alone = answers(llm, prompts, together=False)
    with starter_llm(dtype="bfloat16", **options) as llm:
        together = answers(llm, prompts, together=True)
    equal = 0
    for one, other in zip(alone, together, strict=True):
        parts = [i for i, (a, b) in enumerate(zip(one.token_ids, other.token_ids)) if a != b]
        equal += not parts
        if parts:
            best, second = sorted(e.logprob for e in one.logprobs[parts[0]].values())[-1:-3:-1]
            assert best - second < NEAR_TIE, (parts[0], best, second)
    assert equal >= least_equal(len(prompts), NUM_TOKENS)


@pytest.mark.slow
def test_deterministic_texts_and_logprobs_are_equal() -> None:
    found = []
    for options, together in (({}, False), ({"max_num_batched_tokens": 97}, True)):
        with starter_llm(dtype="bfloat16", deterministic=True, **options) as llm:
            outs = answers(llm, prompts_of(llm), together)
            found.append(
                [
                    (o.token_ids, [[e.logprob for e in at.values()] for at in o.logprobs])
                    for o in outs
                ]
            )
    assert found[0] == found[1]
