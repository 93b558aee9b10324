"""Text as it is made, from one branch and then from two at the same time."""

from __future__ import annotations

import asyncio

from cotrt import LLM, Branch


async def follow(name: str, branch: Branch) -> None:
    """Print the chunks of one branch, each on a line that names it."""
    async for chunk in branch.generate(max_tokens=8, temperature=0.8):
        print(f"{name}: {chunk.text!r}")


async def follow_both(left: Branch, right: Branch) -> None:
    await asyncio.gather(follow("left ", left), follow("right", right))


def main() -> None:
    with LLM("smollm2-135m") as llm:
        root = llm.branch([{"role": "user", "content": "Tell me about the moon."}])
        with root.fork() as [branch]:
            for chunk in branch.generate(max_tokens=40, temperature=0.0):
                print(chunk.text, end="", flush=True)
            print("\n")

        left, right = root.fork(2)
        asyncio.run(follow_both(left, right))


if __name__ == "__main__":
    main()
