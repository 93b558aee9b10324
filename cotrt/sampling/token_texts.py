"""The text of each token of a growing list: joined, they are the list's text."""

from __future__ import annotations

from collections.abc import Sequence

from .detokenizer import Decoder, Detokenizer


class TokenTexts:
    """One text a token.

    A character of several tokens belongs to the one that completes it; a token inside it, and one
    that shows nothing, have "".

    Args:
        tokenizer: decodes; None gives empty texts.
        skip_special_tokens: special tokens show nothing.
        context_ids: what stands before, as in `Detokenizer`.
    """

    def __init__(
        self,
        tokenizer: Decoder | None,
        *,
        skip_special_tokens: bool,
        context_ids: Sequence[int] = (),
    ) -> None:
        self._detokenizer = None
        if tokenizer is not None:
            self._detokenizer = Detokenizer(
                tokenizer, skip_special_tokens=skip_special_tokens, context_ids=context_ids
            )

    def append(self, ids: Sequence[int]) -> list[str]:
        """The texts of the next tokens."""
        if self._detokenizer is None:
            return [""] * len(ids)
        return [self._detokenizer.append([token]) for token in ids]

    def flush(self) -> str:
        """What an incomplete character at the end shows."""
        return "" if self._detokenizer is None else self._detokenizer.flush()
