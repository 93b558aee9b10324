"""Text of a generation: watched for stop strings as it grows, or read by a stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cotrt.params import SamplingParams

if TYPE_CHECKING:
    pass

# A detokenizer looks at this many tokens before the first generated one.
_CONTEXT = 6


class TextWatch:
    """Detokenises on the engine's thread and looks for stop strings.

    Attributes:
        text: what may be shown: final, cut at a match, nothing held back once ended.
        stop_reason: the stop string that matched, or None.
    """

    def __init__(self, tokenizer: Any, params: SamplingParams, context_ids: list[int]) -> None:
        from cotrt.sampling.stop import StopChecker

        self._checker = StopChecker(tokenizer, params, context_ids)

    def append(self, token: int, may_stop: bool) -> str | None:
        """The text after `token`; the stop string that it completed, if it `may_stop` yet."""
        return self._checker.append(token, may_stop=may_stop)
