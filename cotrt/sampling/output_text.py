"""A generation's text: ids in, shown text out, stop strings found on the way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from cotrt.options.sampling import SamplingParams

from .detokenizer import Detokenizer
from .stop import StopChecker, StopMatch


class TextTokenizer(Protocol):
    """What is asked of a tokenizer here."""

    @property
    def all_special_ids(self) -> frozenset[int]: ...

    def decode(self, ids: Sequence[int], /, *, skip_special_tokens: bool = False) -> str: ...


class OutputText:
    """Detokenizer and stop checker of one generation.

    With stop strings, special tokens are decoded even where they are not shown: a stop may be one.

    Args:
        tokenizer: of the model.
        params: for ``stop``, ``include_stop_str_in_output``, ``min_tokens`` and
            ``skip_special_tokens``.
        context_ids: ids before the generated ones; the last few are enough.
    """

    def __init__(
        self, tokenizer: TextTokenizer, params: SamplingParams, context_ids: Sequence[int] = ()
    ) -> None:
        self._checker = StopChecker(params.stop, params.include_stop_str_in_output)
        self._has_stops = bool(params.stop)
        self._min_tokens = params.min_tokens
        self._show_end = params.include_stop_str_in_output
        hide = params.skip_special_tokens and self._has_stops
        self._hidden = tokenizer.all_special_ids if hide else frozenset()
        self._detokenizer = Detokenizer(
            tokenizer,
            skip_special_tokens=params.skip_special_tokens and not hide,
            context_ids=context_ids,
        )
        self._num_tokens = 0

    def append(self, ids: Sequence[int]) -> StopMatch | None:
        """Takes sampled ids.

        Returns:
            The match of a stop string, with how many of the ids were used; the rest are ignored.
        """
        if not self._has_stops:
            self._checker.append(self._detokenizer.append(ids))
            self._num_tokens += len(ids)
            return None
        for used, token_id in enumerate(ids, 1):
            if match := self._take(token_id, hidden=token_id in self._hidden):
                return StopMatch(match.stop, used)
        return None

    def append_end(self, token_id: int) -> StopMatch | None:
        """Takes the end-of-sequence or stop token that ended the generation.

        It is shown only with ``include_stop_str_in_output``, but may be what a stop string says.
        """
        hidden = not self._show_end or token_id in self._hidden
        match = self._take(token_id, hidden=hidden)
        if hidden and match is None:
            self._checker.append(self._detokenizer.flush(), hidden=True, check=False)
        return StopMatch(match.stop, 1) if match else None

    def take(self) -> str:
        """Text to stream: what is new and can no longer change."""
        return self._checker.safe_text()

    def finish(self) -> str:
        """No more ids come: the last text to stream."""
        self._checker.append(self._detokenizer.flush(), check=False)
        return self._checker.finish()

    @property
    def text(self) -> str:
        """All of the shown text; final after `finish` or a match."""
        return self._checker.text

    @property
    def match(self) -> StopMatch | None:
        """The stop string that was found, if any."""
        return self._checker.match

    def _take(self, token_id: int, *, hidden: bool) -> StopMatch | None:
        self._num_tokens += 1
        check = self._num_tokens > self._min_tokens
        if hidden:
            # A character that is still incomplete never will be complete: it is shown as it is.
            self._checker.append(self._detokenizer.flush(), check=check)
        text = self._detokenizer.append([token_id])
        return self._checker.append(text, hidden=hidden, check=check)
