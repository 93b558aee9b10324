"""The runner of random programs: a broken law is found, named and shrunk."""

from __future__ import annotations

import pytest
from program_runner import VERBS, draw_program, failure_of, law_of, run_program, shrink

from cotrt.tree.kv_tree import KVTree


def test_a_program_depends_on_its_number_alone() -> None:
    assert str(draw_program(7, 30)) == str(draw_program(7, 30)) != str(draw_program(8, 30))
    program = draw_program(7, 30, tiers="disk", num_blocks=6, paced=True)
    first, second = run_program(program), run_program(program)
    assert first == second
    assert (first.num_verbs, first.num_steps > 0) == (30, True)


def test_programs_have_every_verb() -> None:
    names = {name for number in range(20) for name, _ in draw_program(number, 200).verbs}
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
