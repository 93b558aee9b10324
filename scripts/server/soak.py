"""Streaming clients, a third of which drop at random: nothing leaks, nobody's text changes.

python scripts/server/soak.py --clients 200 --seconds 300
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import sys
import time
from dataclasses import dataclass

import anyio
from scripted_server import by_path, serving


@dataclass
class Tally:
    """What happened."""

    whole: int = 0
    dropped: int = 0
    tokens: int = 0
    wrong: int = 0


def expected(prompt: str, count: int) -> str:
    """What the model says to a prompt, by the model itself."""
    path = [*map(ord, prompt)]
    for _ in range(count):
        path.append(max(by_path(path)))
    return "".join(map(chr, path[len(prompt) :]))


async def client(port: int, number: int, end: float, tally: Tally, rng: random.Random) -> None:
    while time.monotonic() < end:
        # A third of the prompts share a beginning.
        prompt = ("shared " * 9 if number % 3 else "") + f"client {number} {rng.randrange(50)}: "
        count = rng.randrange(5, 60)
        drops_at = rng.randrange(count) if rng.random() < 1 / 3 else None
        body = json.dumps({"prompt": prompt, "max_tokens": count, "temperature": 0, "stream": True})
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
            text = ""
            if drops_at == 0:
                tally.dropped += 1
                continue
            async for raw in reader:
                line = raw.strip()
                if line == b"data: [DONE]":
                    tally.whole += 1
                    tally.tokens += count
                    tally.wrong += text != expected(prompt, count)
                    break
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    text += "".join(choice["text"] for choice in event["choices"])
                    if drops_at is not None and len(text) >= drops_at:
                        tally.dropped += 1
                        break
        finally:
            writer.close()


async def _all(port: int, num_clients: int, seconds: float, seed: int) -> Tally:
    tally, end = Tally(), time.monotonic() + seconds
    async with anyio.create_task_group() as group:
        for number in range(num_clients):
            rng = random.Random(seed * 1000 + number)
            group.start_soon(client, port, number, end, tally, rng)
    return tally


def run(num_clients: int, seconds: float, seed: int = 1) -> dict[str, float]:
    """Run the clients and check what is left.

    Returns:
        Counts, and the growth of the process's memory in MiB after a first tenth.

    Raises:
        AssertionError: a text was wrong, or work, places or KV were left over.
    """
    with serving(by_path, max_num_seqs=64, kv_cache_memory_bytes=1 << 16) as server:
        llm, service = server.service.llm, server.service
        asyncio.run(_all(server.port, num_clients, seconds / 10, seed))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        tally = asyncio.run(_all(server.port, num_clients, seconds, seed + 1))
        deadline = time.monotonic() + 5
        while llm.metrics["running"] + llm.metrics["waiting"] + service.admission.num_admitted:
            assert time.monotonic() < deadline, "work was left over"
            time.sleep(0.01)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        memory = llm.memory()
        assert memory.in_use == 0, f"{memory.in_use} blocks were left in use"
        assert tally.wrong == 0, f"{tally.wrong} texts were wrong"
        assert tally.whole and tally.dropped
        return {
            "whole": tally.whole,
            "dropped": tally.dropped,
            "tokens": tally.tokens,
            "preemptions": llm.metrics["preemptions"],
            "memory_grown_mib": round(grown, 1),
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print(json.dumps(run(options.clients, options.seconds, options.seed)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
