"""KV of the right tokens that was computed after another path is found, wherever it comes from."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from engine_rig import Rig

from cotrt.engine.records.record_stores import TierOptions
from cotrt.tree.tiers import record_keys, tiers

SAME = [2] * 8


def _two_paths(**options: int) -> tuple[Rig, list[int]]:
    """A rig, and the blocks of equal tokens in two branches of it."""
    rig, blocks = Rig(**options), []
    for first in (1, 3):
        branch = rig.root([first] * 8 + SAME + [1])
        rig.start(branch, max_tokens=1)
        rig.run()
        blocks.append(branch._seq.node.blocks[-1])
    return rig, blocks


def test_a_block_of_another_path_breaks_the_laws() -> None:
    rig, (source, target) = _two_paths()
    rig.check()
    rig.model.copy_blocks([(source, target)])
    with pytest.raises(AssertionError, match=f"block {target} was computed after another path"):
        rig.check()


def test_a_block_of_another_path_is_found_by_the_row_that_reads_it() -> None:
    rig, (source, target) = _two_paths()
    rig.checks = False
    rig.model.copy_blocks([(source, target)])
    rig.start(rig.root([1] * 8 + SAME + [1, 2]), max_tokens=1)
    rig.run()
    rig.start(rig.root([3] * 8 + SAME + [1, 2]), max_tokens=1)
    with pytest.raises(AssertionError, match="computed after another path"):
        rig.run()


def test_a_record_whose_key_ignores_the_path_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def next_key(key: bytes, ids: Sequence[int]) -> bytes:
        return record_keys._hash(bytes(ids))

    def run() -> None:
        rig = Rig(num_blocks=4, tiers=TierOptions(host_bytes=1 << 16, always="move"))
        for ids in ([1] * 8 + SAME + [1], [3] * 8 + [5] * 9, [4] * 30, [3] * 8 + SAME + [1]):
            rig.start(rig.root(ids), max_tokens=1)
            rig.run()

    run()
    for module in (record_keys, tiers):
        monkeypatch.setattr(module, "next_key", next_key)
    with pytest.raises(AssertionError, match="computed after another path"):
        run()
