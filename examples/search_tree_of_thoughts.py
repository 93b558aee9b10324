"""Tree of thoughts, depth first: proposals, values, pruning, backtracking. The game of 24."""

from __future__ import annotations

from itertools import combinations

import cotrt
from cotrt import LLM, search
from cotrt.testing import ScriptedModel

START = [4, 9, 10, 13]


def numbers_left(node: search.Node) -> list[float]:
    """The numbers after the path's last step, as written behind "left:"."""
    steps = node.path_text.strip().splitlines()
    return [float(x) for x in steps[-1].split("left:")[1].split()] if steps else START


def propose(node: search.Node) -> list[str]:
    """Every step from here: two numbers become one."""
    left = numbers_left(node)
    thoughts = []
    for i, j in combinations(range(len(left)), 2):
        rest = [x for k, x in enumerate(left) if k not in (i, j)]
        low, high = sorted((left[i], left[j]))
        for sign, value in (("+", high + low), ("-", high - low), ("*", high * low)):
            after = " ".join(f"{x:g}" for x in [*rest, value])
            thoughts.append(f"{high:g} {sign} {low:g} = {value:g} left: {after}")
    return thoughts


def value(node: search.Node) -> float:
    """1 for 24 alone, 0 for another number alone; nearness of the largest number before that."""
    left = numbers_left(node)
    return float(left == [24]) if len(left) == 1 else 1 / (2 + abs(24 - max(left)))


def main() -> None:
    model = ScriptedModel(lambda ids: {0: 1.0}, vocab_size=128, eos_token_id=0)
    with LLM(model, kv_cache_memory_bytes=2**22) as llm:
        options = {"propose": propose, "score": value, "breadth": 36, "branching": 36}
        result = cotrt.run(
            search.tree_of_thoughts, llm, "24!", method="dfs", depth=3, accept=1.0, **options
        )
        print(result.text)
        print(f"{len(result.tree.nodes)} thoughts, {result.stopped_by}")


if __name__ == "__main__":
    main()
