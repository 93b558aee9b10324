"""Verbs of random programs that make a step fail, its memory, its logits or the tokenizer."""

from __future__ import annotations

from collections import Counter

from draws import among, flag, number, verb
from late_device import LateModel
from shadows import PARAMS
from work_verbs import WorkVerbs

from cotrt.errors import NumericsError


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

    @verb(2, room=among(0, 1, 2, 5, 17), copies=flag, count=among(1, 2, 4, 8))
    def memory_is_short(self, room: int, copies: bool, count: int) -> None:
        """The device has room for small steps only, or for none, or not for copies."""
        self.errors.add(MemoryError)
        self.rig.model.room = room
        self.rig.model.no_room_to_copy = copies
        self.steps(count)
        self.rig.model.room = None
        self.rig.model.no_room_to_copy = False

    @verb(1, one_in=among(1, 3, 7), raises=flag, count=among(1, 2, 4))
    def weights_are_wrong(self, one_in: int, raises: bool, count: int) -> None:
        """Logits of some paths are NaN, or the function that gives them raises."""
        # A late device has forgotten why when it is asked.
        self.errors |= {ZeroDivisionError, NumericsError} if raises else {NumericsError}
        self.weights.one_in, self.weights.raises = one_in, raises
        self.steps(count)
        self.weights.one_in = 0

    @verb(1, count=among(1, 2, 4))
    def tokenizer_raises(self, count: int) -> None:
        self.errors.add(LookupError)
        self.tokenizer.is_broken = True
        self.steps(count)
        self.tokenizer.is_broken = False

    def happened(self) -> Counter[str]:
        happened = super().happened()
        happened["no memory"] = self.rig.model.num_shortages
        return happened
