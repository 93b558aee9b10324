"""A tree of thought: grow steps by fork, score them, prune the weak, and see what was shared."""

from __future__ import annotations

from cotrt import LLM, Branches

PROMPT = """\
Problem: Ben has 2 bags with 5 marbles each. He loses 3 marbles. How many are left?
Step: 2 bags of 5 marbles are 2 * 5 = 10 marbles.
Step: 10 marbles less 3 marbles are 10 - 3 = 7 marbles.
Answer: 7

Problem: A shelf has 4 rows of 6 books. 5 books are sold. How many are left?
Step: 4 rows of 6 books are 4 * 6 = 24 books.
Step: 24 books less 5 books are 24 - 5 = 19 books.
Answer: 19

Problem: Mia has 3 bags with 4 marbles each. She loses 2 marbles. How many are left?
"""
FORKS, KEEP, DEPTH = 4, 2, 3


def grow(frontier: Branches) -> Branches:
    """Give every branch FORKS next steps; all of them come back, the best first."""
    steps = Branches(child for branch in frontier for child in branch.fork(FORKS))
    outputs = steps.generate(max_tokens=40, stop="\n", temperature=0.8).result()
    scores = steps.score(" correct", given="This is").result()
    order = sorted(range(len(steps)), key=lambda i: -scores[i].mean)
    for place, i in enumerate(order):
        print(f"  {'keep ' if place < KEEP else 'prune'} {scores[i].mean:7.3f}  {outputs[i].text}")
    return Branches(steps[i] for i in order)


def show_cost(llm: LLM, leaves: Branches) -> None:
    """Print what the tree cost, with the branches of the last level alive."""
    kv = [branch.kv for branch in leaves]
    block_bytes = kv[0].bytes / kv[0].blocks
    print(f"  tokens generated        {llm.metrics['generated_tokens']:8}")
    print(f"  prompt tokens computed  {llm.metrics['prompt_tokens_computed']:8}")
    print(f"  prompt tokens reused    {llm.metrics['prompt_tokens_reused']:8}")
    print(f"  blocks shared           {sum(each.shared_blocks for each in kv):8}")
    print(f"  blocks private          {sum(each.private_blocks for each in kv):8}")
    print(f"  KV MiB with sharing     {llm.memory().in_use * block_bytes / 2**20:8.1f}")
    print(f"  KV MiB without          {sum(each.bytes for each in kv) / 2**20:8.1f}")


with LLM("smollm2-135m") as llm:
    root = llm.branch(PROMPT)
    print(PROMPT.splitlines()[-1])
    frontier = Branches([root])
    for depth in range(1, DEPTH + 1):
        print(f"\nstep {depth}")
        leaves = grow(frontier)
        frontier = leaves[:KEEP]
        if depth < DEPTH:
            leaves[KEEP:].prune()
    print(f"\nthe winner\n{leaves[0].decode(len(root), len(leaves[0]))}\nthe cost")
    show_cost(llm, leaves)
