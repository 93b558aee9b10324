"""What HTTP costs: 64 parallel requests beside llm.generate, and a short request beside a long one.

python scripts/server/http_cost.py --model smollm2-135m --reps 3
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import http.client
import json
import statistics
import sys
import threading
import time
from typing import Any

from cotrt import LLM, SamplingParams
from cotrt.server.options import ServerOptions
from cotrt.server.serving import Server

NUM_REQUESTS, NUM_TOKENS, LONG_PROMPT = 64, 32, 4000


def post(port: int, body: dict[str, Any]) -> Any:
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    link.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    reply = json.loads(link.getresponse().read())
    link.close()
    return reply


def first_token_s(port: int, prompt: str) -> float:
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "stream": True}
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    started = time.perf_counter()
    headers = {"content-type": "application/json"}
    link.request("POST", "/v1/completions", json.dumps(body), headers)
    link.getresponse().readline()
    seconds = time.perf_counter() - started
    link.close()
    return seconds


def measure(llm: LLM, port: int, reps: int) -> dict[str, Any]:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    direct, served = [], []
    for rep in range(reps + 1):  # the first is not counted
        prompts = [f"run {rep}, story {i}: once upon a time" for i in range(NUM_REQUESTS)]
        started = time.perf_counter()
        llm.generate([f"direct {p}" for p in prompts], params, use_tqdm=False)
        direct.append(time.perf_counter() - started)
        body = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        bodies = [{**body, "prompt": f"served {prompt}"} for prompt in prompts]
        with concurrent.futures.ThreadPoolExecutor(NUM_REQUESTS) as pool:
            started = time.perf_counter()
            list(pool.map(functools.partial(post, port), bodies))
            served.append(time.perf_counter() - started)
    alone, beside = [], []
    for rep in range(reps):
        alone.append(first_token_s(port, f"alone {rep}: hello there"))
        ids = [(rep * 7919 + i * 31) % 40000 + 100 for i in range(LONG_PROMPT)]
        long = threading.Thread(target=post, args=(port, {"prompt": ids, "max_tokens": 1}))
        long.start()
        while not llm.metrics["running"]:
            time.sleep(0.001)
        beside.append(first_token_s(port, f"beside {rep}: hello there"))
        long.join()
    tokens = NUM_REQUESTS * NUM_TOKENS
    one, other = statistics.median(direct[1:]), statistics.median(served[1:])
    return {
        "direct_tokens_per_s": round(tokens / one),
        "served_tokens_per_s": round(tokens / other),
        "overhead": round(other / one - 1, 3),
        "first_token_alone_s": round(statistics.median(alone), 4),
        f"first_token_beside_{LONG_PROMPT}_tokens_s": round(statistics.median(beside), 4),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    options = parser.parse_args()
    up = threading.Event()
    with LLM(options.model, max_num_batched_tokens=options.max_num_batched_tokens) as llm:
        server = Server(llm, ServerOptions(port=0), lambda port: up.set())
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        up.wait()
        print(json.dumps(measure(llm, server.port, options.reps), indent=1))
        server.should_exit = True
        thread.join()
    return 0


if __name__ == "__main__":
    sys.exit(main())
