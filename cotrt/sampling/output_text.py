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

    def token_text(self, token_id: int, /) -> str: ...


class OutputText:
    """Detokenizer and stop checker of one generation.

    Special tokens that are not shown are looked at all the same: a stop string may be one.

    Args:
        tokenizer: of the model.
        params: for ``stop``, ``include_stop_str_in_output``, ``min_tokens`` and
            ``skip_special_tokens``.
        context_ids: ids before the generated ones; the last NUM_CONTEXT_IDS are enough.
        hides_end: never show the token that ends it, whatever the params say.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        params: SamplingParams,
        context_ids: Sequence[int] = (),
        *,
        hides_end: bool = False,
    ) -> None:
        self._checker = StopChecker(params.stop, params.include_stop_str_in_output)
        self._has_stops = bool(params.stop)
        self._min_tokens = params.min_tokens
        self._show_end = params.include_stop_str_in_output and not hides_end
        skips = params.skip_special_tokens
        self._tokenizer = tokenizer
        self._skipped = tokenizer.all_special_ids if skips else frozenset()
        self._detokenizer = Detokenizer(
            tokenizer, skip_special_tokens=skips, context_ids=context_ids
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
            if match := self._take(token_id):
                return StopMatch(match.stop, used)
        return None

    def append_end(self, token_id: int) -> StopMatch | None:
        """Takes the end-of-sequence or stop token that ended the generation.

        It is shown only with ``include_stop_str_in_output``, but may be what a stop string says.
        """
        is_shown = self._show_end and token_id not in self._skipped
        match = self._take(token_id, hidden=not is_shown)
        return StopMatch(match.stop, 1) if match else None

    def append_all(self, ids: Sequence[int], *, ended_by_token: bool = False) -> None:
        """Takes ids whose end is known already.

        Args:
            ids: all that come now.
            ended_by_token: the last of them is the token that ended the generation.
        """
        self.append(ids[:-1] if ended_by_token else ids)
        if ended_by_token and ids:
            self.append_end(ids[-1])

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

    def _take(self, token_id: int, *, hidden: bool = False) -> StopMatch | None:
        """Takes one token; a `hidden` one is the last."""
        self._num_tokens += 1
        check = self._num_tokens > self._min_tokens
        if hidden:
            # A character that is still incomplete never will be complete: it is shown as it is.
            self._checker.append(self._detokenizer.flush(), check=check)
        if token_id in self._skipped:
            # The text goes on as if it were not there; a stop string may be its spelling.
            text = self._tokenizer.token_text(token_id) if self._has_stops else ""
            return self._checker.append(text, hidden=True, check=check)
        text = self._detokenizer.append([token_id])
        if hidden:
            text += self._detokenizer.flush()
        return self._checker.append(text, hidden=hidden, check=check)
