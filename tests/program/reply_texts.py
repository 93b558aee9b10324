"""Random replies of models: thoughts, calls in each format, what looks like one, and plain text."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from typing import Any

from cotrt.program.reply_parser import CallDelta, Event, ReplyParser, Thought

STYLES = (None, "hermes", "llama3_json", "any")
NUM_TEXTS = int(os.environ.get("COTRT_LONG_TESTS", "0")) * 1800 + 200
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>"]
WORDS = [
    "text",
    " ",
    "\n",
    "é🦊",
    "<",
    "<to",
    "</",
    "{",
    "}",
    '"',
    ";",
    "[1]",
    "a < b",
    "\\",
    "<thi",
]
ARGUMENTS = [
    *(
        '{"a": [1, {"b": "}\\""}]}',
        "{}",
        "null",
        '""',
        '"{\\"q\\": 1}"',
        '"no"',
        "3",
        "[1]",
        '"{}"',
    ),
    *('{"a": "</tool_call>"}', '{"x": 1', "{nonsense}", '{"n": -1.5e3, "t": true}'),
]


def random_call(rng: random.Random) -> str:
    name = rng.choice(['"f"', '"g"', '"unknown"', "3", '"f'])
    key = rng.choice(["arguments", "parameters", "argument"])
    pairs = [f'"name": {name}', f'"{key}": {rng.choice(ARGUMENTS)}']
    if rng.random() < 0.2:
        pairs.append(rng.choice(['"id": 7', '"name": "g"', '"arguments": {}', "x"]))
    if rng.random() < 0.2:
        rng.shuffle(pairs)
    if rng.random() < 0.1:
        pairs.pop()
    return "{" + rng.choice([", ", ","]).join(pairs) + "}"


def random_reply(rng: random.Random) -> str:
    parts = []
    if rng.random() < 0.4:
        parts.append(rng.choice(["<think>", " <think>\n", "hm</think>", "<think>a</think>\n\n"]))
    for _ in range(rng.randrange(7)):
        kind = rng.random()
        if kind < 0.3:
            parts.append(rng.choice(TAGS))
        elif kind < 0.6:
            parts.append(rng.choice(WORDS))
        elif kind < 0.85:
            parts.append(f"<tool_call>\n{random_call(rng)}\n</tool_call>")
        else:
            parts.append(random_call(rng))
    text = "".join(parts)
    return text[: rng.randrange(len(text) + 1)] if rng.random() < 0.2 else text


def joined(events: list[Event]) -> tuple[str, str, list[tuple[str, str]]]:
    """Thought, content and calls (name, arguments)."""
    thought, content, calls = "", "", []
    for event in events:
        if isinstance(event, CallDelta):
            if event.name is not None:
                assert event.index == len(calls) and len(event.id or "") == 9
                calls.append([event.name, ""])
            calls[event.index][1] += event.arguments
        elif isinstance(event, Thought):
            thought += event.text
        else:
            content += event.text
    return thought, content, [(name, arguments) for name, arguments in calls]


def read(
    text: str, cuts: Sequence[int] = (), **options: Any
) -> tuple[str, str, list[tuple[str, str]]]:
    """A text as `ReplyParser` reads it, in the pieces that `cuts` makes."""
    parser, events, last = ReplyParser(**options), [], 0
    for cut in [*sorted(cuts), len(text)]:
        events += parser.append(text[last:cut])
        last = cut
    return joined(events + parser.finish())


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False
