"""Text of a generation as a reader sees it, from its first token on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cotrt.engine.state import GenerationState

if TYPE_CHECKING:
    from cotrt.sampling.output_text import TextTokenizer


class StreamText:
    """Turns a generation's tokens into the pieces of its text, in the reader's own thread.

    Args:
        tokenizer: of the model; None gives no text.
        state: of the generation.
        hides_end: never show the token that ended it.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer | None,
        state: GenerationState,
        *,
        hides_end: bool = False,
    ) -> None:
        self._state = state
        self._text = None
        if tokenizer is not None:
            from cotrt.sampling.output_text import OutputText

            self._text = OutputText(tokenizer, state.params, state.context, hides_end=hides_end)

    def append(self, ids: Sequence[int], last: bool) -> str:
        """New text that is final; `last` says that no more ids come."""
        if self._text is None:
            return ""
        state = self._state
        ended_by_id = last and state.finish_reason == "stop" and not state.matched_text
        self._text.append_all(ids, ended_by_token=ended_by_id)
        return self._text.take() + (self._text.finish() if last else "")
