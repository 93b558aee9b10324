"""A branch with a past, what can be seen of it, and what may be done with it."""

from __future__ import annotations

from typing import Any

from cotrt import LLM, Branch


def describe(branch: Branch) -> dict[str, Any]:
    """What a program can see of a branch and of those below it."""
    return {
        "tokens": branch.token_ids,
        "logprobs": branch.logprobs,
        "sampled": branch.sampled,
        "finished": branch.finished,
        "metadata": branch.metadata,
        "children": [describe(child) for child in branch.children],
    }


def go_on(branch: Branch) -> list[Any]:
    """What a program may do with a branch, and all that it brings."""
    found: list[Any] = [branch.generate(max_tokens=20).result().token_ids]
    found += [g.token_ids for g in branch.fork(2).generate(max_tokens=9).result()]
    branch.truncate(len(branch) - 7)
    found.append(branch.generate(max_tokens=9).result().token_ids)
    found += [score.logprobs for score in branch.score(["ab", "c"]).result()]
    found.append(branch.choose(["x", "yz"]).result().index)
    found += [go_on(child) for child in branch.children[:1]]
    return found


def grown(llm: LLM) -> Branch:
    """A branch with a past: retries, forks that were pruned, a closed child with children."""
    root = llm.branch("In the beginning " * 5)
    root.generate(max_tokens=30).result()
    root.truncate(60)
    root.generate(max_tokens=25, seed=9).result()
    children = root.fork(4)
    children[0].prune()
    children[1:].extend(" and then")
    children[1:].generate(max_tokens=40).result()
    children[1].metadata.update(score=-0.5, notes=["a", {"b": None}])
    grand = children[2].fork(2, at=50)
    grand.generate(max_tokens=5).result()
    children[2].truncate(40)
    children[2].extend("elsewhere")
    children[2].close()
    root._kept = [*children, *grand]  # so that they live as long as the root
    return root
