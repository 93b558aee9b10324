"""A tree of thought: grow steps by fork, score them, prune the weak, and see what was shared."""

from __future__ import annotations

from cotrt import LLM, Branch, Branches

QUESTION = "Anna has 3 boxes with 4 apples in each. She eats 2 apples. How many apples are left?"
ASK = f"{QUESTION} Think step by step, one short sentence a line."
JUDGE = "\nQuestion: is the reasoning above correct? Answer:"
FORKS, KEEP, DEPTH = 4, 2, 3


def grow(frontier: Branches, start: int) -> Branches:
    """Give every branch of the frontier FORKS next steps, and keep the KEEP best of all."""
    steps = Branches(child for branch in frontier for child in branch.fork(FORKS))
    steps.generate(max_tokens=40, stop="\n", temperature=0.9).result()
    scores = steps.score(" Yes", given=JUDGE).result()
    ranked = sorted(zip(steps, scores, strict=True), key=lambda pair: -pair[1].mean)
    for place, (branch, score) in enumerate(ranked):
        text = branch.decode(start, len(branch), skip_special_tokens=True).strip()
        print(
            f"  {'keep ' if place < KEEP else 'prune'} {score.mean:7.3f}  {text.splitlines()[-1:]}"
        )
    return Branches(branch for branch, _ in ranked)


def show_sharing(llm: LLM, branches: Branches) -> None:
    """Print what the tree cost, with all the branches of the last level alive."""
    kv = [branch.kv for branch in branches]
    block_bytes = kv[0].bytes / kv[0].blocks
    rows = {
        "tokens generated": llm.metrics["generated_tokens"],
        "prompt tokens computed": llm.metrics["prompt_tokens_computed"],
        "prompt tokens reused": llm.metrics["prompt_tokens_reused"],
        "KV blocks shared, over all branches": sum(each.shared_blocks for each in kv),
        "KV blocks private, over all branches": sum(each.private_blocks for each in kv),
        "KV MiB with sharing": f"{llm.memory().in_use * block_bytes / 2**20:.1f}",
        "KV MiB without": f"{sum(each.bytes for each in kv) / 2**20:.1f}",
    }
    for name, value in rows.items():
        print(f"  {name:<38}{value:>10}")


def main() -> None:
    with LLM("smollm2-135m") as llm:
        root: Branch = llm.branch([{"role": "user", "content": ASK}])
        print(QUESTION)
        frontier = Branches([root])
        for depth in range(DEPTH):
            print(f"\nstep {depth + 1}")
            steps = grow(frontier, len(root))
            if depth == DEPTH - 1:
                print(f"\nthe winner\n{steps[0].decode(len(root), len(steps[0]))}\n\nthe cost")
                show_sharing(llm, steps)
            frontier = steps[:KEEP]
            steps[KEEP:].prune()


if __name__ == "__main__":
    main()
