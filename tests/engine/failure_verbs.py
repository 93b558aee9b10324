"""Verbs of random programs that make a step fail, its memory, its logits or the tokenizer."""

from __future__ import annotations

from collections import Counter

from draws import among, flag, number, verb
from late_device import LateModel
from shadows import MAX_LEN, PARAMS, picked
from work_verbs import WorkVerbs

from cotrt.errors import NumericsError
from cotrt.options.sampling import SamplingParams

LONG = [params for params in PARAMS if (params.max_tokens or 0) >= 5]
_PATIENCE = 24  # steps until something is made to fail
WITH_STOPS = [params for params in LONG if params.stop]  # the engine asks the tokenizer for these


class FailureVerbs(WorkVerbs):
    """What fails ends the requests that it has to, and nothing else."""

    @verb(1, pick=number, late=flag)
    def step_fails(self, pick: int, late: bool) -> None:
        """A step raises: the requests in it end, everything else goes on.

        Args:
            late: it raises on the device and not at its launch, where the device runs behind.
        """
        self.do_generate(4 * pick + 2, PARAMS[pick % len(PARAMS)])
        self.come_ahead(8 if pick % 4 else 1)
        if not self.rig.engine.has_work:
            return
        self.errors.add(RuntimeError)
        self.rig.model.fail = RuntimeError("made to fail")
        if isinstance(self.rig.model, LateModel):
            self.rig.model.fails_late = late
        self.step()
        self.rig.model.fail = None
        self.step()

    def come_ahead(self, limit: int) -> None:
        """Up to so many steps, until the engine runs ahead of a late device."""
        for _ in range(limit):
            if self.rig.ahead is None and self.rig.engine.has_work:
                self.step()

    def have_generate(self, number: int, choice: list[SamplingParams]) -> None:
        """A generate with one of these runs: where none does, it starts."""
        if any(run.state is not None and run.state.params in choice for run in self.running):
            return
        longest = min(self.capacity, MAX_LEN - 1)
        able = [s for s in self.held() if s.busy is None and 0 < len(s.ids) <= longest]
        if not able:
            self.new_root([1, 2, 3])
            able = self.held()[-1:]
        self.start(picked(able, number, lambda s: s.key), choice[number % len(choice)])

    @verb(2, pick=number, room=among(0, 1, 2, 5, 17), copies=flag, count=among(1, 2, 4, 8))
    def memory_is_short(self, pick: int, room: int, copies: bool, count: int) -> None:
        """The device has room for small steps only, or for none, or not for copies."""
        if not self.rig.engine.has_work:
            self.have_generate(pick, LONG)
        self.errors.add(MemoryError)
        self.rig.model.room = room
        self.rig.model.no_room_to_copy = copies
        self.steps(count)
        self.rig.model.room = None
        self.rig.model.no_room_to_copy = False

    @verb(2, pick=number, one_in=among(1, 3, 7), raises=flag, count=among(1, 2, 4))
    def weights_are_wrong(self, pick: int, one_in: int, raises: bool, count: int) -> None:
        """Logits of some paths are NaN, or the function that gives them raises.

        Args:
            count: steps of it, and more until it has happened.
        """
        self.have_generate(pick, LONG)
        # A late device has forgotten why when it is asked.
        self.errors |= {ZeroDivisionError, NumericsError} if raises else {NumericsError}
        self.weights.one_in, self.weights.raises = one_in, raises
        before = self.weights.num_wrong
        self.steps(count)
        for _ in range(_PATIENCE):
            if self.weights.num_wrong == before and self.rig.engine.has_work:
                self.step()
        self.weights.one_in = 0

    @verb(2, pick=number, count=among(1, 2, 4))
    def tokenizer_raises(self, pick: int, count: int) -> None:
        """It fails where a generate looks for its stop strings; more steps, as above."""
        self.have_generate(pick, WITH_STOPS)
        self.errors.add(LookupError)
        before = self.tokenizer.num_raised
        self.tokenizer.is_broken = True
        self.steps(count)
        for _ in range(_PATIENCE):
            if self.tokenizer.num_raised == before and self.rig.engine.has_work:
                self.step()
        self.tokenizer.is_broken = False

    def happened(self) -> Counter[str]:
        happened = super().happened()
        happened["no memory"] = self.rig.model.num_shortages
        return happened
