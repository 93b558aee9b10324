"""Retry: roll a branch back to where it was good and let it draw again."""

from __future__ import annotations

import json
from typing import Any

from cotrt import LLM

ASK = 'Describe a cat as JSON with the keys "name" (a string) and "age" (a number).'


def parse(text: str) -> Any:
    """The object in the text, or None where it is not JSON with exactly those keys."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return None
    return value if isinstance(value, dict) and set(value) == {"name", "age"} else None


def main() -> None:
    with LLM("smollm2-135m") as llm:
        branch = llm.branch([{"role": "user", "content": ASK}])
        branch.extend('{"name": "')
        start = len(branch)
        for attempt in range(1, 21):
            output = branch.generate(max_tokens=24, stop="}", temperature=0.8).result()
            text = '{"name": "' + output.text + "}"
            cat = parse(text)
            print(f"{attempt:2}. {'good' if cat else 'bad '}  {text!r}")
            if cat:
                break
            # The tokens before `start` stay as they are, and so does their KV. The next draw is
            # another one; same_draws=True would repeat this one.
            branch.truncate(start)

        computed = llm.metrics["prompt_tokens_computed"]
        print(f"{computed} prompt tokens computed for {attempt} attempts on {start} tokens")


if __name__ == "__main__":
    main()
