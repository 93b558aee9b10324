"""Random saved trees: branches, their KV, and files of them; no torch."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from cotrt.plan import KVShape, UInt8
from cotrt.saved.layout import Chunk, SavedBranch, chunks_of

SHAPE = KVShape(2, 2, 1, 2, "bfloat16")


def random_tree(seed: int, *, branches: int = 6, tokens: int = 200) -> list[SavedBranch]:
    """Branches of which each shares a part of its parent's tokens."""
    pick = random.Random(seed)
    made: list[SavedBranch] = []
    for index in range(pick.randint(1, branches)):
        parent = pick.randrange(index) if index else -1
        shared = pick.randint(0, made[parent].length) if index else 0
        count = pick.choice([0, 1, 63, 64, 65, pick.randint(0, tokens)])
        sampled = np.array([pick.random() < 0.5 for _ in range(count)], np.uint8)
        logprobs = np.array([-pick.random() if each else np.nan for each in sampled], np.float64)
        made.append(
            SavedBranch(
                tokens=np.array([pick.randrange(1 << 17) for _ in range(count)], np.int32),
                logprobs=logprobs,
                sampled=sampled,
                parent=parent,
                shared=shared,
                seed=pick.choice([0, 1, (1 << 64) - 1, pick.getrandbits(64)]),
                epoch=pick.randrange(4),
                fork_count=pick.randrange(9),
                fork_number=index,
                fork_length=shared + pick.randrange(3),
                ended_at=pick.choice([-1, shared + count]),
                id=100 + index,
                closed=bool(index) and pick.random() < 0.2,
                metadata=pick.choice([None, {"score": pick.random(), "a": [1, None, "\ud800"]}]),
                grammar=pick.choice([None, ({"regex": "a+"}, shared)]),
            )
        )
    return made


def random_kv(
    seed: int, branches: list[SavedBranch], shape: KVShape = SHAPE
) -> list[tuple[Chunk, UInt8]]:
    """KV of a leading part of each branch's own tokens, here and there with a hole."""
    numbers = np.random.default_rng(seed)
    pick = random.Random(seed)
    kv = []
    for index, branch in enumerate(branches):
        stop = pick.choice(
            [branch.shared, branch.length, pick.randint(branch.shared, branch.length)]
        )
        for chunk in chunks_of(index, branch.shared, stop):
            if pick.random() < 0.95:
                size = chunk.num_tokens * shape.token_bytes
                kv.append((chunk, numbers.integers(0, 256, size, dtype=np.uint8)))
    return kv


def path_of(branches: list[SavedBranch], index: int) -> list[int]:
    """All tokens of a branch."""
    branch = branches[index]
    above = path_of(branches, branch.parent)[: branch.shared] if branch.parent >= 0 else []
    return above + branch.tokens.tolist()


def fields_of(branch: SavedBranch) -> dict[str, Any]:
    """A branch in a form that compares."""
    found = {name: getattr(branch, name) for name in SavedBranch.__dataclass_fields__}
    for name in ("tokens", "logprobs", "sampled"):
        found[name] = [None if v != v else v for v in np.asarray(found[name]).tolist()]
    return found
