"""A file as a source of records: keys of blocks of any size, and what lies under them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from saved_trees import SHAPE, path_of, random_kv, random_tree

from cotrt.engine.records.saved_source import SavedSource
from cotrt.errors import SavedBranchError
from cotrt.saved.layout import SavedBranch
from cotrt.saved.reader import SavedFile
from cotrt.saved.writer import write
from cotrt.tree.tiers.record_keys import next_key, root_key


@given(seed=st.integers(0, 1 << 32), block_size=st.sampled_from([8, 16, 32, 64, 128, 256]))
@settings(max_examples=60, deadline=None)
def test_keys_are_those_of_the_paths_and_records_are_theirs(
    tmp_path_factory: pytest.TempPathFactory, seed: int, block_size: int
) -> None:
    branches = random_tree(seed)
    kv = random_kv(seed, branches)
    path = tmp_path_factory.mktemp("b") / "b"
    write(path, branches, kv, shape=SHAPE, fingerprint="a model")
    source = SavedSource(SavedFile(path), name="a model", block_size=block_size)
    by_position: list[dict[int, np.ndarray]] = []  # the KV of each branch's path
    expected: dict[bytes, list[np.ndarray]] = {}
    for index, branch in enumerate(branches):
        above = by_position[branch.parent] if branch.parent >= 0 else {}
        mine = {at: token for at, token in above.items() if at < branch.shared}
        for chunk, record in kv:
            if chunk.branch == index:
                for i in range(chunk.num_tokens):
                    mine[chunk.start + i] = SHAPE.cut(record, i, i + 1)
        by_position.append(mine)
        key, tokens = root_key("a model", block_size), path_of(branches, index)
        first = next(at for at in range(branch.length + 1) if at not in mine)
        assert source.num_covered[index] == first
        for start in range(0, len(tokens), block_size):
            ids = tokens[start : start + block_size]
            for i in range(len(ids)):
                if start + i not in mine:
                    break
                records = [mine[start + j] for j in range(i + 1)]
                expected.setdefault(next_key(key, ids[: i + 1]), SHAPE.join(records))
            key = next_key(key, ids)
    found = source.keys()
    assert set(found) <= set(expected)
    for key, part in found.items():
        assert part.num_tokens <= block_size
        assert np.array_equal(source.read(part), expected[key])
    for index, branch in enumerate(branches):  # whole blocks, and the last of the KV, are there
        tokens, mine = path_of(branches, index), by_position[index]
        key = root_key("a model", block_size)
        for start in range(0, len(tokens), block_size):
            ids = tokens[start : start + block_size]
            count = next((i for i in range(len(ids)) if start + i not in mine), len(ids))
            if count and (count == block_size or start + count > branch.shared):
                assert next_key(key, ids[:count]) in found
            key = next_key(key, ids)


def test_a_deep_chain_of_branches_without_tokens(tmp_path: Path) -> None:
    """20,000 forks of which each tenth has a token: keys take a moment, not minutes."""
    branches = []
    for index in range(20_000):
        count = 1 if index % 10 == 0 else 0
        shared = branches[-1].length if branches else 0
        ids = np.full(count, index % 7, np.int32)
        values, flags = np.full(count, np.nan), np.zeros(count, np.uint8)
        branches.append(SavedBranch(ids, values, flags, parent=index - 1, shared=shared))
    write(tmp_path / "b", branches, [], shape=SHAPE, fingerprint="")
    source = SavedSource(SavedFile(tmp_path / "b"), name="", block_size=16)
    assert not source.keys()
    assert source.num_covered == [0] * 20_000


def test_a_closed_source_reads_no_more(tmp_path: Path) -> None:
    branches = random_tree(7, branches=4)
    write(tmp_path / "b", branches, random_kv(7, branches), shape=SHAPE, fingerprint="")
    source = SavedSource(SavedFile(tmp_path / "b"), name="", block_size=16)
    part = next(iter(source.keys().values()))
    source.read(part)
    source.close()
    source._file._last = None
    with pytest.raises(SavedBranchError):
        source.read(part)
