"""The machine that tries to break the engine: all verbs, and all that it may be made with."""

from __future__ import annotations

import random
from typing import Any

from draws import among, flag, ids, number
from late_verbs import LateVerbs
from saving_verbs import SavingVerbs
from tier_verbs import TIERS


class EngineProgram(LateVerbs, SavingVerbs):
    """A program of random verbs; each class above has some of them and says what has to hold."""

    @staticmethod
    def draw_settings(pick: random.Random) -> dict[str, Any]:
        """Arguments of `make`."""
        return {
            "num_blocks": among(2, 3, 4, 5, 6, 8, 12, 20, 64)(pick),
            "block_size": among(8, 16)(pick),
            "max_num_seqs": among(1, 2, 4, 256)(pick),
            "budget": among(1, 5, 16, 64, 2048)(pick),
            "scored": among(1, 3, 1024)(pick),
            "match": flag(pick),
            "ids": ids(pick),
            "tiers": among("none", *TIERS)(pick),
            "always": among("move", "move", "move", "compute", None, None)(pick),
            "paced": flag(pick),
            "pace": number(pick),
            "plain": pick.random() < 0.6,
            "late": number(pick) if pick.random() < 0.3 else None,
        }
