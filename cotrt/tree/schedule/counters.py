"""What the scheduler counts."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from cotrt.tree.schedule.counting import SeenTokens
from cotrt.tree.schedule.step import Step

# Steps whose tokens are told apart together: a pass over arrays, whatever their number.
_STEPS_A_PASS = 16


@dataclass(slots=True)
class Counters:
    """Totals since the start; see `LLM.metrics` in the API for the meanings.

    The counts of tokens are up to date after `count_tokens`.
    """

    prompt_tokens_computed: int = 0
    generated_tokens_computed: int = 0
    prompt_tokens_reused: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    seen: SeenTokens = field(default_factory=SeenTokens)
    _uncounted: list[Step] = field(default_factory=list)

    def note(self, step: Step) -> None:
        """`step` was run and counts."""
        self.steps += 1
        self._uncounted.append(step)
        if len(self._uncounted) >= _STEPS_A_PASS:
            self.count_tokens()

    def count_tokens(self) -> None:
        """Bring the counts of tokens up to date."""
        steps, self._uncounted = self._uncounted, []
        if not steps:
            return
        new = np.concatenate([step.counted for step in steps])
        sampled = np.concatenate([step.sampled for step in steps])[new]
        first = self.seen.add(np.concatenate([step.hashes for step in steps])[new])
        self.prompt_tokens_computed += int((first & ~sampled).sum())
        self.generated_tokens_computed += int((first & sampled).sum())
        dropped = sum(int(step.dropped.sum()) for step in steps if step.dropped is not None)
        self.recomputed_tokens += len(new) - dropped - int(first.sum())
