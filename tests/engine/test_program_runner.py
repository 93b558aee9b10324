"""The runner of random programs: a broken law is found, named and shrunk."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from program_runner import VERBS, draw_program, failure_of, law_of, run_program, shrink
from quick_sampling import quick_token_logprobs

from cotrt.sampling.sampler import token_logprobs
from cotrt.tree.kv_tree import KVTree


def test_a_program_depends_on_its_number_alone() -> None:
    assert str(draw_program(7, 30)) == str(draw_program(7, 30)) != str(draw_program(8, 30))
    program = draw_program(7, 30, tiers="disk", num_blocks=6, paced=True)
    first, second = run_program(program), run_program(program)
    assert first == second
    assert (first.num_verbs, first.num_steps > 0) == (30, True)


def test_programs_have_every_verb() -> None:
    names = {name for number in range(20) for name, _, _ in draw_program(number, 200).verbs}
    assert names == set(VERBS)


def test_a_law_that_is_broken_is_named_and_its_program_shrunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def leaky(self: KVTree, seq: object, keep: int) -> None:
        if len(seq.private) > keep:  # one block less than has to go
            del seq.private[keep:]

    monkeypatch.setattr(KVTree, "_trim_private", leaky)
    program, failure = next(
        (program, failure)
        for program in (draw_program(number, 40) for number in range(20))
        if (failure := failure_of(program)) is not None
    )
    assert "holders" in law_of(failure) or "block" in failure
    smallest = shrink(program, seconds=20)
    assert len(smallest.verbs) < len(program.verbs) / 2
    assert failure_of(smallest) is not None


def test_quick_scores_are_the_engines() -> None:
    pick = torch.Generator().manual_seed(0)
    logits = torch.randint(0, 5, (40, 12), generator=pick).float().log()
    logits[:, 3] = 0.0  # something is possible
    logits[7, 2] = torch.nan
    rows = torch.randint(0, 40, (90,), generator=pick)
    ids = torch.randint(0, 12, (90,), generator=pick)
    counts = np.arange(90, dtype=np.int32) % 14 - 1
    counts[(rows == 7).numpy()] = -1
    values, top = quick_token_logprobs(logits, rows, ids, counts)
    expected, expected_top = token_logprobs(logits, rows, ids, counts)
    np.testing.assert_allclose(values, expected, atol=1e-5)
    assert sorted(top) == sorted(expected_top)
    for draw, entry in top.items():
        other = expected_top[draw]
        assert entry.ids.tolist() == other.ids.tolist()
        assert entry.rank == other.rank
        np.testing.assert_allclose(entry.logprobs, other.logprobs, atol=1e-5)
