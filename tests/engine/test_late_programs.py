"""Random programs on a device that runs late: the same laws, and the same tokens from scratch."""

from __future__ import annotations

import collections
import os
from typing import Any

from engine_rig import Rig
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test
from late_device import LateRig, random_pace
from tree_program import Running, TreeProgram, numbers

from cotrt.params import SamplingParams

NUM_PROGRAMS = int(os.environ.get("COTRT_PROGRAMS", "500")) // 2

totals: collections.Counter[str] = collections.Counter()


class LateProgram(TreeProgram):
    """A `TreeProgram` whose model runs behind it. Three in four generates need nothing of the host.

    A verb acts before a step is waited for, with another launched behind it, where one can be.
    """

    rig: LateRig

    def _new_rig(self, ids: list[int], **options: Any) -> Rig:
        return LateRig(pace=random_pace(sum(ids)), **options)

    def _generate(self, pick: int, params: SamplingParams) -> None:
        super()._generate(pick, _plain(params, pick))

    def _submit(self, prompts: list[list[int]], params: SamplingParams) -> None:
        super()._submit(prompts, _plain(params, len(prompts)))

    def _fork(self, pick: int, n: int, at: int | None) -> None:
        seq = self._seq(pick)
        if seq is not None and self.rig.is_ahead(seq):
            totals["fork"] += 1
            self.rig._shared.update(seq.private[:1] if seq.private_len else [])
        super()._fork(pick, n, at)

    def _truncate(self, pick: int, at: int, same: bool) -> None:
        totals["truncate"] += self._writes(pick)
        super()._truncate(pick, at, same)

    def _extend(self, pick: int, ids: list[int]) -> None:
        totals["extend"] += self._writes(pick)
        super()._extend(pick, ids)

    def _prune(self, pick: int) -> None:
        totals["prune"] += self._writes(pick)
        super()._prune(pick)

    def _cancel(self, pick: int) -> None:
        if self.running:
            run: Running = self.running[pick % len(self.running)]
            totals["cancel"] += run.state is not None and self.rig.is_ahead(run.state.seq)
        super()._cancel(pick)

    def _seq(self, pick: int) -> Any:
        owner = self._pick(pick)
        return None if owner is None or owner.branch is None else owner.branch._seq

    def _writes(self, pick: int) -> bool:
        """The branch has a row in a step that runs ahead, wanted or not."""
        seq = self._seq(pick)
        return seq is not None and self.rig.is_ahead(seq)

    @rule(late=st.booleans())
    def step_fails(self, late: bool = False) -> None:
        """A step fails at its launch or on the device: its requests end, and nothing else."""
        if not self.rig.engine.has_work or len(self.shadows) % 3:
            return
        self.rig.model.fail, self.rig.model.fails_late = RuntimeError("made to fail"), late
        self._step()
        totals["fail ahead"] += self.rig.ahead is not None and self.rig.model.fail is None
        self.rig.model.fail = None
        self._step()

    @rule(when=numbers)
    def between(self, when: int) -> None:
        """A call between steps finds nothing in flight."""

        def verb() -> None:
            engine = self.rig.engine
            totals["between"] += self.rig.ahead is not None
            engine.when_between_steps(lambda: (not engine._in_flight) or 1 / 0)

        self._do(when, verb)

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "rig"):
            totals.update(self.rig.fences)
            totals["ahead"] += self.rig.model.num_ahead
            totals["steps"] += self.rig.metrics["steps"]


def _plain(params: SamplingParams, number: int) -> SamplingParams:
    if number % 4 == 0:
        return params
    return params.replace(presence_penalty=0.0, repetition_penalty=1.0, logprobs=None, min_tokens=0)


def test_branches_of_random_programs_on_a_late_device_go_on_as_from_scratch() -> None:
    totals.clear()
    run_state_machine_as_test(
        LateProgram,
        settings=settings(
            max_examples=NUM_PROGRAMS,
            stateful_step_count=40,
            deadline=None,
            database=None,
            derandomize="COTRT_PROGRAMS" not in os.environ,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink],
            print_blob=False,
        ),
    )
    print(dict(totals))
    assert totals["ahead"] > totals["steps"] // 5
    for fence in (
        "fork", "prune", "cancel", "truncate", "extend", "copy", "free", "reuse", "dropped",
        "all dropped", "between", "fail ahead",
    ):  # fmt: skip
        assert totals[fence], f"no program came to the fence of {fence!r}"
