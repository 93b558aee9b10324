"""Random programs on a device that runs late: verbs act while the engine is a step ahead of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from draws import among, ids, number, verb
from failure_verbs import FailureVerbs
from late_device import LateRig, random_pace
from shadows import PARAMS, Shadow, picked
from tree_verbs import TreeVerbs

from cotrt.options.sampling import SamplingParams


class LateVerbs(FailureVerbs, TreeVerbs):
    """Verbs that mean most on a late device, and make sense on any.

    Attributes:
        fences: how often verbs met a step that ran ahead, by what they did.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_late = False
        self.is_plain = False
        self.fences: Counter[str] = Counter()

    def make(self, *, late: int | None = None, plain: bool = False, **settings: Any) -> None:
        """Beside the rest, a device.

        Args:
            late: a third of these never run by themselves; None: one that runs at once.
            plain: three in four generates ask for nothing that makes a step slow, as on a late
                device, which would not run ahead else.
        """
        self.is_plain = plain or late is not None
        if late is not None:
            self.is_late = True
            self.new_rig = partial(LateRig, pace=random_pace(late, self.chance))
        super().make(**settings)

    def do(self, when: int, act: Callable[[], None]) -> None:
        """On a late device mostly once the engine has come to run ahead, if it does."""
        if self.is_late and when % 3:
            self.come_ahead(2 + when % 5)
        super().do(when, act)

    def pick(self, number: int) -> Shadow | None:
        """Mostly a branch with a row in the step that runs ahead, where one does."""
        if self.is_late and number % 4 and self.rig.ahead is not None:
            held = self.held()
            ahead = [s for s in held if s.branch is not None and self._is_ahead(s)]
            if ahead:
                return picked(ahead, number, lambda s: s.key)
        return super().pick(number)

    def _is_ahead(self, shadow: Shadow | None) -> bool:
        if shadow is None or shadow.branch is None:
            return False
        return self.rig.is_ahead(shadow.branch._seq)

    def do_generate(self, pick: int, params: SamplingParams) -> None:
        super().do_generate(pick, self._plain(params, pick))

    def do_submit(self, prompts: list[list[int]], params: SamplingParams) -> None:
        super().do_submit(prompts, self._plain(params, len(prompts)))

    def _plain(self, params: SamplingParams, number: int) -> SamplingParams:
        if not self.is_plain or number % 4 == 0:
            return params
        return params.replace(
            presence_penalty=0.0, repetition_penalty=1.0, logprobs=None, min_tokens=0
        )

    def do_fork(self, pick: int, n: int, at: int | None) -> None:
        owner = self.pick(pick)
        if isinstance(self.rig, LateRig) and self._is_ahead(owner):
            assert owner is not None and owner.branch is not None
            seq = owner.branch._seq
            self.fences["fork"] += 1
            self.rig._shared.update(seq.private[:1] if seq.private_len else [])
        super().do_fork(pick, n, at)

    def do_prune(self, pick: int) -> None:
        self.fences["prune"] += self._is_ahead(self.pick(pick))
        super().do_prune(pick)

    def do_cancel(self, pick: int) -> None:
        run = self.pick_run(pick)
        if run is not None:
            self.fences["cancel"] += run.state is not None and self.rig.is_ahead(run.state.seq)
        super().do_cancel(pick)

    @verb(2, when=number, pick=number, at=number, ids=ids)
    def go_on_otherwise(self, when: int, pick: int, at: int, ids: list[int]) -> None:
        """Cancel, truncate, extend and generate at once, while the branch is being written."""
        self.do(when, lambda: self._go_on_otherwise(pick, at, ids))

    def _go_on_otherwise(self, pick: int, at: int, ids: list[int]) -> None:
        owner = self.pick(pick)
        if owner is None or owner.busy is None or owner.busy.kind != "generate":
            return
        self.fences["go on otherwise"] += self._is_ahead(owner)
        owner.busy.cancelled = True
        owner.busy.handle.cancel()
        self.look()
        self.do_truncate(pick, max(0, len(owner.ids) - at % 9), False)
        self.do_extend(pick, ids)
        self.do_generate(pick, PARAMS[at % len(PARAMS)])

    @verb(3, pick=number, what=among("fork", "fork", "prune", "cancel", "go on", "go on"))
    def meddle(self, pick: int, what: str) -> None:
        """A verb on a branch that was just told to generate, once that runs ahead."""
        self.do_generate(4 * pick + 2, PARAMS[pick % len(PARAMS)])
        self.come_ahead(8 if self.is_late else 1)
        verbs: dict[str, Callable[[], None]] = {
            "fork": lambda: self.do_fork(pick, 2, None),
            "prune": lambda: self.do_prune(pick),
            "cancel": lambda: self.do_cancel(pick),
            "go on": lambda: self._go_on_otherwise(pick, pick, [1, 2, 3]),
        }
        super().do(1, verbs[what])

    @verb(3, when=number)
    def between(self, when: int) -> None:
        """A call between steps finds nothing in flight."""

        def act() -> None:
            engine = self.rig.engine
            self.fences["between"] += self.rig.ahead is not None
            engine.when_between_steps(lambda: (not engine._in_flight) or 1 / 0)

        self.do(when, act)

    def happened(self) -> Counter[str]:
        happened = super().happened()
        if isinstance(self.rig, LateRig):
            happened.update({f"late: {name}": n for name, n in self.fences.items()})
            happened.update({f"late: {name}": n for name, n in self.rig.fences.items()})
            happened["late: fail ahead"] = self.rig.model.num_failed_ahead
            happened["late: ahead"] = self.rig.model.num_ahead
        return happened
