"""Many programs at once under asyncio: await a handle, cancel a slow one, lose nothing."""

from __future__ import annotations

import asyncio

from cotrt import LLM

CITIES = ("Paris", "Tokyo", "Cairo", "Lima", "Oslo", "Delhi")


async def describe(llm: LLM, city: str) -> str:
    """Two candidates for one city; the one that the model itself finds more likely."""
    root = llm.branch(f"A short, true sentence about {city}: {city} is")
    with root, root.fork(2) as candidates:
        outputs = await candidates.generate(max_tokens=24, stop=["\n", "."], temperature=0.7)
        best = max(outputs, key=lambda output: output.cumulative_logprob / len(output.token_ids))
    return f"{city} is{best.text}."


async def main() -> None:
    with LLM("smollm2-135m") as llm:
        # All of them share every step of the engine.
        for sentence in await asyncio.gather(*(describe(llm, city) for city in CITIES)):
            print(sentence)

        # A time limit cancels the work; the branch keeps the tokens it has.
        branch = llm.branch("Once upon a time")
        start = len(branch)
        try:
            await asyncio.wait_for(branch.generate(max_tokens=2000, ignore_eos=True), timeout=1.0)
        except asyncio.TimeoutError:
            print(f"cut after {len(branch) - start} tokens: {branch.text[:60]!r}...")


if __name__ == "__main__":
    asyncio.run(main())
