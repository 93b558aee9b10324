"""Random programs on a device that runs late: the same laws, and the same tokens from scratch."""

from __future__ import annotations

import collections
import os
from collections.abc import Callable
from typing import Any

from engine_rig import Rig
from hypothesis import strategies as st
from hypothesis.stateful import rule
from late_device import LateRig, random_pace
from run_programs import run_programs
from tree_program import PARAMS, Running, Shadow, TreeProgram, numbers, token_lists

from cotrt.engine.record_stores import TierOptions
from cotrt.params import SamplingParams

NUM_PROGRAMS = int(os.environ.get("COTRT_PROGRAMS", "500")) // 5

totals: collections.Counter[str] = collections.Counter()


class LateProgram(TreeProgram):
    """A `TreeProgram` whose model runs behind it. Three in four generates need nothing of the host.

    A verb acts before a step is waited for, with another launched behind it, where one can be.
    """

    rig: LateRig

    def _new_rig(self, ids: list[int], **options: Any) -> Rig:
        tiers = TierOptions(host_bytes=16 * 32, always="move") if len(ids) % 2 else None
        return LateRig(pace=random_pace(sum(ids)), tiers=tiers, **options)

    def _do(self, when: int, verb: Callable[[], None]) -> None:
        """Mostly once the engine has come to run ahead, if it does in some steps."""
        if when % 3:
            self._come_ahead(2 + when % 5)
        super()._do(when, verb)

    def _come_ahead(self, limit: int) -> None:
        for _ in range(limit):
            if self.rig.ahead is None and self.rig.engine.has_work:
                self._step()

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

    def _prune(self, pick: int) -> None:
        seq = self._seq(pick)
        totals["prune"] += seq is not None and self.rig.is_ahead(seq)
        super()._prune(pick)

    def _cancel(self, pick: int) -> None:
        if self.running:
            run: Running = self.running[pick % len(self.running)]
            totals["cancel"] += run.state is not None and self.rig.is_ahead(run.state.seq)
        super()._cancel(pick)

    def _seq(self, pick: int) -> Any:
        owner = self._pick(pick)
        return None if owner is None or owner.branch is None else owner.branch._seq

    def _pick(self, number: int) -> Shadow | None:
        """Mostly a branch with a row in the step that runs ahead."""
        held = self._held()
        ahead = [s for s in held if s.branch is not None and self.rig.is_ahead(s.branch._seq)]
        if ahead and number % 4:
            return ahead[number % len(ahead)]
        return held[number % len(held)] if held else None

    @rule(when=numbers, pick=numbers, at=numbers, ids=token_lists)
    def go_on_otherwise(self, when: int, pick: int, at: int, ids: list[int]) -> None:
        """Cancel, truncate, extend and generate at once, while the branch is being written."""

        self._do(when, lambda: self._go_on_otherwise(pick, at, ids))

    def _go_on_otherwise(self, pick: int, at: int, ids: list[int]) -> None:
        owner, seq = self._pick(pick), self._seq(pick)
        if owner is None or owner.busy is None or owner.busy.kind != "generate":
            return
        totals["go on otherwise"] += self.rig.is_ahead(seq)
        run = owner.busy
        run.cancelled = True
        run.handle.cancel()
        self._look()
        self._truncate(pick, max(0, len(owner.ids) - at % 9), False)
        self._extend(pick, ids)
        self._generate(pick, PARAMS[at % len(PARAMS)])

    @rule(pick=numbers, late=st.booleans())
    def step_fails(self, pick: int = 0, late: bool = False) -> None:
        """A step fails at its launch or on the device: its requests end, and nothing else."""
        self._generate(4 * pick + 2, PARAMS[pick % len(PARAMS)])
        self._come_ahead(8 if pick % 4 else 1)
        if not self.rig.engine.has_work:
            return
        self.rig.model.fail, self.rig.model.fails_late = RuntimeError("made to fail"), late
        self._step()
        self.rig.model.fail = None
        self._step()

    @rule(pick=numbers, what=st.sampled_from(["fork", "prune", "cancel", "go on"]))
    def meddle(self, pick: int, what: str) -> None:
        """A verb on a branch that was just told to generate, once that runs ahead."""
        self._generate(4 * pick + 2, PARAMS[pick % len(PARAMS)])
        self._come_ahead(8)
        verbs: dict[str, Callable[[], None]] = {
            "fork": lambda: self._fork(pick, 2, None),
            "prune": lambda: self._prune(pick),
            "cancel": lambda: self._cancel(pick),
            "go on": lambda: self._go_on_otherwise(pick, pick, [1, 2, 3]),
        }
        super()._do(1, verbs[what])

    @rule(pick=numbers, what=st.sampled_from(["fork", "go on"]))
    def meddle_more(self, pick: int, what: str) -> None:
        self.meddle(pick, what)

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
            totals["fail ahead"] += self.rig.model.num_failed_ahead
            totals["ahead"] += self.rig.model.num_ahead
            totals["steps"] += self.rig.metrics["steps"]


def _plain(params: SamplingParams, number: int) -> SamplingParams:
    if number % 4 == 0:
        return params
    return params.replace(presence_penalty=0.0, repetition_penalty=1.0, logprobs=None, min_tokens=0)


def test_branches_of_random_programs_on_a_late_device_go_on_as_from_scratch() -> None:
    totals.clear()
    run_programs(LateProgram, NUM_PROGRAMS)
    print(dict(totals))
    if NUM_PROGRAMS < 100:
        return  # too few to come everywhere
    assert totals["ahead"] > totals["steps"] // 10
    fences = (
        "fork", "prune", "cancel", "go on otherwise", "copy", "free", "reuse", "dropped",
        "all dropped", "between", "fail ahead", "store", "load",
    )  # fmt: skip
    missing = [fence for fence in fences if not totals[fence]]
    assert len(missing) <= 2, f"no program came to the fences of {missing}"
