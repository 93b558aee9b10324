"""Malformed and odd requests, 10,000 by default: none may be answered by a 500.

python scripts/server/fuzz.py --requests 10000 --seed 1
"""

from __future__ import annotations

import argparse
import collections
import copy
import http.client
import json
import random
import sys
import time
from typing import Any

from scripted_server import anything, serving

VALID: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 2, "logprobs": 1, "echo": True, "n": 2},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        "response_format": {"type": "text"},
    },
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [104, 105]},
    "/v1/branches": {"prompt": "hello", "ttl": 1},
    "/v1/branches/ID/fork": {"n": 2, "at": 3},
    "/v1/branches/ID/extend": {"text": "more"},
    "/v1/branches/ID/generate": {"max_tokens": 2, "seed": 1, "stop": ["x"]},
    "/v1/branches/ID/score": {"continuations": ["a", "b"], "given": "c"},
    "/v1/branches/ID/choose": {"options": ["a", "b"], "normalize": "sum"},
    "/v1/branches/ID/truncate": {"length": 4},
    "/v1/branches/ID/keep": {"ttl": 5},
}
FIELDS = sorted(
    {name for body in VALID.values() for name in body}
    | {"temperature", "top_p", "top_k", "min_p", "logit_bias", "allowed_token_ids", "bad_words"}
    | {"guided_regex", "guided_json", "guided_choice", "guided_grammar", "structured_outputs"}
    | {"branch_id", "model", "best_of", "chat_template", "chat_template_kwargs", "tool_choice"}
    | {"repetition_penalty", "presence_penalty", "min_tokens", "priority", "ignore_eos", "user"}
)
ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 1.5, -0.0, 1e308, 10**6, 2**31, 2**63, 2**64, -(2**70)),
    *("", "a", "\u0000", "\ud7ff", "\U0001f98a", "x" * 5000, "NaN", "(", "[", "{{", "<|im_end|>"),
    *([], [[]], [None], [1], [-1], [300], [1, "a"], ["a", 1], ["", ""], [[1], "a"], [0] * 5000),
    *({}, {"a": {}}, {"1": 1}, {"type": "object"}, {"type": "json_schema"}, {"": None}),
]


def random_value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.random()
    if kind < 0.7 or depth > 3:
        return copy.deepcopy(rng.choice(ODD))
    if kind < 0.85:
        return [random_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {rng.choice(FIELDS): random_value(rng, depth + 1) for _ in range(rng.randrange(4))}


def random_body(rng: random.Random, path: str) -> bytes:
    body = json.loads(json.dumps(VALID[path]))
    for _ in range(rng.choice((1, 1, 1, 2))):
        where = body
        for _ in range(rng.randrange(3)):
            inner = [v for v in where.values() if isinstance(v, dict) and v]
            where = rng.choice(inner) if inner else where
        name = rng.choice(FIELDS if rng.random() < 0.4 or not where else sorted(where))
        if rng.random() < 0.15:
            where.pop(name, None)
        else:
            where[name] = random_value(rng)
    raw = bytearray(json.dumps(body).encode())
    if rng.random() < 0.1:
        for _ in range(rng.randrange(1, 4)):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
    if rng.random() < 0.05:
        del raw[rng.randrange(len(raw)) :]
    return bytes(raw)


def run(num_requests: int, seed: int, seconds: float | None = None) -> collections.Counter[int]:
    """Send them.

    Returns:
        How many replies there were of each status.

    Raises:
        AssertionError: a reply was a 5xx, or an error without OpenAI's shape.
    """
    rng = random.Random(seed)
    statuses: collections.Counter[int] = collections.Counter()
    end = None if seconds is None else time.monotonic() + seconds
    with serving(anything, model_len=512, max_num_seqs=64) as server:
        link = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        ids = ["br-none"]
        for number in range(num_requests):
            if end is not None and time.monotonic() > end:
                break
            path = rng.choice(list(VALID))
            raw = random_body(rng, path)
            target = path.replace("ID", rng.choice(ids))
            kind = "application/json" if rng.random() < 0.98 else "text/html"
            link.request("POST", target, raw, {"content-type": kind})
            reply = link.getresponse()
            text = reply.read()
            statuses[reply.status] += 1
            assert reply.status < 500, (seed, number, target, raw[:2000], text)
            if reply.status >= 400:
                error = json.loads(text)["error"]
                assert error["message"] and set(error) == {"message", "type", "param", "code"}
            elif path in ("/v1/branches", "/v1/branches/ID/fork"):
                made = json.loads(text)
                ids += [each["id"] for each in made.get("data", [made])]
                ids = ids[-20:]
        link.request("GET", "/health")
        assert link.getresponse().status == 200
        link.close()
    return statuses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    statuses = run(options.requests, options.seed)
    print(f"{sum(statuses.values())} requests: {dict(sorted(statuses.items()))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
