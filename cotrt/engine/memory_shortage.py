"""A device that has no memory left for a step: how that is told, and who makes room."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

from cotrt.engine.kept_errors import let_go
from cotrt.tree.schedule.scheduler import Scheduler
from cotrt.tree.schedule.step import Step
from cotrt.tree.schedule.work import Work

logger = logging.getLogger(__name__)

# How torch puts it where it has no class of its own for it: its CPU allocator, and CUDA itself.
_SAID = ("can't allocate memory", "out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error`, raised by a model's step, says that memory has run out."""
    torch = sys.modules.get("torch")
    kinds = (MemoryError,) if torch is None else (MemoryError, torch.OutOfMemoryError)
    if isinstance(error, kinds):
        return True
    return isinstance(error, RuntimeError) and any(said in str(error) for said in _SAID)


def give_back_memory(model: Any, error: BaseException) -> None:
    """Drop what the failed step still holds, so that a smaller one finds room."""
    let_go(error)
    give_back = getattr(model, "give_back_memory", None)
    if give_back is not None:
        give_back()


class MemoryShortage:
    """Makes steps smaller, and ends requests where a single token has no room.

    The limit of a step's tokens is halved as often as it takes. Where one token does not fit twice
    in a row, the newest of all requests is tried alone. If its token fits, the shortage is of the
    one that failed, which ends; if not, memory is short for all, and the newest ends.

    Args:
        scheduler: told how large steps may be, and of whom the next one is.
        fail: ends a work that has not ended, with an error.
    """

    def __init__(self, scheduler: Scheduler, fail: Callable[[Work, BaseException], None]) -> None:
        self._scheduler = scheduler
        self._fail = fail
        self._suspect: tuple[Work, BaseException] | None = None

    def step_failed(self, step: Step, error: BaseException) -> None:
        """The device had no memory for `step`, which was undone."""
        num_tokens, limit = len(step.plan.input_ids), self._scheduler.limit
        if limit.halve(num_tokens):
            logger.warning(
                "the device has no memory for a step of %d tokens: steps have %d from now on, more "
                "when that goes well (%s)", num_tokens, limit.tokens, error
            )  # fmt: skip
            return
        works = step.works()
        if not works:  # it only stored what was evicted: that is lost
            return
        failed = max(works, key=_age)
        newest = max([*self._scheduler.running, *self._scheduler.waiting], key=_age, default=failed)
        if not self.is_trying and newest not in works:
            self._suspect = failed, error
            self._scheduler.only = newest
            return
        self._forget()
        self._end(failed, error)

    def step_went_well(self) -> None:
        """There was memory for a step."""
        if self.is_trying:
            assert self._suspect is not None
            work, error = self._suspect
            self._forget()
            self._end(work, error)

    nothing_to_try = step_went_well  # the newest waits for another's rows: one has to end

    @property
    def is_trying(self) -> bool:
        """The next step is of the newest request alone."""
        return self._scheduler.only is not None

    def _forget(self) -> None:
        self._suspect = self._scheduler.only = None

    def _end(self, work: Work, error: BaseException) -> None:
        logger.error(
            "the device has no memory for a step of one token: a request ends", exc_info=error
        )
        shed = MemoryError(
            f"the device has no memory for a step of one token of sequence {work.seq.id} "
            f"({work.seq.length} tokens): free memory of the device, or load the model with a "
            f"smaller KV pool ({error})"
        )
        shed.__cause__ = error
        self._fail(work, shed)


def _age(work: Work) -> int:
    return work.rank[-1]
