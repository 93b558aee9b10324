"""Branches in a server: fork, generate, score and prune from a program that has no model."""

from __future__ import annotations

import threading

from cotrt import LLM, Client
from cotrt.server.options import ServerOptions
from cotrt.server.serving import Server

QUESTION = "Question: what is 7 times 8?\nLet's think step by step.\n"


def think(client: Client) -> None:
    with client.branch(QUESTION, ttl=60) as root, root.fork(4) as branches:
        branches.generate(max_tokens=24, stop="\n", temperature=0.8, seed=1).result()
        scores = branches.score(" Yes", given="\nIs this step right?").result()
        order = sorted(range(4), key=lambda i: -scores[i].mean)
        for i in order:
            print(f"{scores[i].mean:7.3f}  {branches[i].text[len(QUESTION) :].strip()!r}")
        best = branches[order[0]]
        best.extend("So the answer is")
        for chunk in best.generate(max_tokens=8, temperature=0):
            print(chunk.text, end="", flush=True)
        print(f"\n{best.kv.shared_blocks} of its {best.kv.blocks} KV blocks are shared")
    print(f"{len(client.branches())} branches are left on the server")


up = threading.Event()
with LLM("smollm2-135m") as llm:
    server = Server(llm, ServerOptions(port=0), lambda port: up.set())
    # From a shell: cotrt serve smollm2-135m
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    up.wait()
    think(Client(f"http://127.0.0.1:{server.port}"))
    server.should_exit = True
    thread.join()
