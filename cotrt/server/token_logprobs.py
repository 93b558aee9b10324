"""Log-probabilities in OpenAI's two shapes.

The texts of the sampled (or echoed) tokens are cut so that, joined, they are the text: a character
of several tokens belongs to the one that completes it, a token that shows nothing has "".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cotrt.engine.state import GenerationState
from cotrt.sampling.detokenizer import REPLACEMENT, Detokenizer
from cotrt.sampling.logprobs import Logprob

Scores = dict[int, Logprob] | None


class TokenTexts:
    """The text of each token of a growing list."""

    def __init__(self, tokenizer: Any, *, skip_special: bool, context: Sequence[int] = ()) -> None:
        self._detokenizer = None
        if tokenizer is not None:
            self._detokenizer = Detokenizer(
                tokenizer, skip_special_tokens=skip_special, context_ids=context
            )

    def append(self, ids: Sequence[int]) -> list[str]:
        """One text a token."""
        if self._detokenizer is None:
            return [""] * len(ids)
        return [self._detokenizer.append([token]) for token in ids]

    def flush(self) -> str:
        """What an incomplete character at the end shows."""
        return "" if self._detokenizer is None else self._detokenizer.flush()


class SampledTexts(TokenTexts):
    """`TokenTexts` of a generation; the token that ended it shows only what the text shows."""

    def __init__(self, tokenizer: Any, state: GenerationState) -> None:
        params = state.params
        super().__init__(tokenizer, skip_special=params.skip_special_tokens, context=state.context)
        self._state = state
        self._num_seen = 0

    def append(self, ids: Sequence[int]) -> list[str]:
        """One text a token."""
        state = self._state
        self._num_seen += len(ids)
        hides_last = (
            bool(ids)
            and state.promise.done
            and self._num_seen == len(state.tokens)
            and state.finish_reason == "stop"
            and not state.matched_text
            and not state.params.include_stop_str_in_output
        )
        if not hides_last:
            return super().append(ids)
        texts = super().append(ids[:-1])
        return [*texts, self.flush()]


class CompletionLogprobs:
    """``choices[i].logprobs`` of /v1/completions, in parts as they come.

    Args:
        num_top: entries of top_logprobs asked for.
        as_ids: name tokens "token_id:17" in place of their text.
    """

    def __init__(self, num_top: int, *, as_ids: bool = False) -> None:
        self._num_top = num_top
        self._as_ids = as_ids
        self._offset = 0

    def part(
        self, ids: Sequence[int], texts: Sequence[str], scores: Sequence[Scores]
    ) -> dict[str, Any]:
        """The next tokens; a position without scores (a prompt's first) has null."""
        shown = [f"token_id:{i}" if self._as_ids else text for i, text in zip(ids, texts)]
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "text_offset": offsets,
            "token_logprobs": [
                None if each is None else _finite(each[token].logprob)
                for token, each in zip(ids, scores)
            ],
            "tokens": shown,
            "top_logprobs": [
                None if each is None else self._top(token, text, each)
                for token, text, each in zip(ids, shown, scores)
            ],
        }

    def _top(self, token: int, text: str, entries: dict[int, Logprob]) -> dict[str, float]:
        """Likeliest first; tokens of the same text are told apart by their ids."""
        top: dict[str, float] = {}
        for other, entry in _likeliest(token, entries, self._num_top):
            name = f"token_id:{other}" if self._as_ids else entry.decoded_token or ""
            if other == token and text and not self._as_ids:
                name = text
            if name in top:
                name = f"token_id:{other}"
            top[name] = _finite(entry.logprob)
        return top


def chat_logprobs(
    ids: Sequence[int],
    texts: Sequence[str],
    scores: Sequence[dict[int, Logprob]],
    num_top: int,
) -> dict[str, Any]:
    """``choices[i].logprobs`` of /v1/chat/completions."""
    content = []
    for token, text, entries in zip(ids, texts, scores):
        top = _likeliest(token, entries, num_top) if num_top else []
        content.append(
            {
                **_entry(text, entries[token]),
                "top_logprobs": [_entry(entry.decoded_token or "", entry) for _, entry in top],
            }
        )
    return {"content": content, "refusal": None}


def _likeliest(token: int, entries: dict[int, Logprob], num_top: int) -> list[tuple[int, Logprob]]:
    """The `num_top` likeliest, and the sampled token where it is not among them."""
    ranked = sorted(entries.items(), key=lambda item: item[1].rank or 1 << 31)
    return [
        (other, entry)
        for place, (other, entry) in enumerate(ranked)
        if place < num_top or other == token
    ]


def _entry(text: str, entry: Logprob) -> dict[str, Any]:
    # Part of a character has no UTF-8 of its own to show.
    known = REPLACEMENT not in text
    return {
        "token": text,
        "logprob": _finite(entry.logprob),
        "bytes": list(text.encode("utf-8", "replace")) if known else None,
    }


def _finite(logprob: float) -> float:
    """JSON has no infinity; a token of probability 0 gets what OpenAI gives."""
    return max(float(logprob), -9999.0)
