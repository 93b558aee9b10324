"""An agent with two tools; the model is scripted, so that the calls are sure to come."""

from __future__ import annotations

import json

import anyio

import cotrt
from cotrt import LLM, search
from cotrt.testing import ScriptedModel


def multiply(a: float, b: float) -> float:
    """Multiply two numbers."""
    return a * b


async def price(item: str) -> float:
    """Price of one item."""
    await anyio.sleep(0.01)  # as if it asked somebody
    return {"apple": 0.5}[item]


def next_probs(ids: list[int]) -> dict[int, float]:
    """Ask for the price, multiply it, say the result: whatever the tools answered."""
    *before, last = "".join(map(chr, ids)).split("Observation: ")
    seen, _, written = last.partition("\n") if before else ("", "", last.rpartition("?")[2])
    if not before:
        plan = {"name": "price", "arguments": {"item": "apple"}}
    elif len(before) == 1:
        plan = {"name": "multiply", "arguments": {"a": float(seen), "b": 12}}
    else:
        plan = None
    text = f"They cost {seen}." if plan is None else f"<tool_call>{json.dumps(plan)}</tool_call>"
    return {ord(text[len(written)]) if len(written) < len(text) else 0: 1.0}


def main() -> None:
    model = ScriptedModel(next_probs, vocab_size=128, eos_token_id=0)
    with LLM(model, kv_cache_memory_bytes=2**20) as llm:
        root = llm.branch("What do 12 apples cost?")
        result = cotrt.run(search.run_agent, root, [multiply, price], tool_timeout=5.0)
        print(result.tree)
        print(f"\n{result.answer}")


if __name__ == "__main__":
    main()
