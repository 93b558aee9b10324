"""Log-probabilities in OpenAI's two shapes.

The texts of the sampled (or echoed) tokens are cut so that, joined, they are the text: a character
of several tokens belongs to the one that completes it, a token that shows nothing has "". Among
the likeliest a sampled token has the same name. The bytes are those of the token alone, whatever
its text shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cotrt.engine.state import GenerationState
from cotrt.sampling.logprobs import Logprob
from cotrt.sampling.token_texts import TokenTexts

Scores = dict[int, Logprob] | None


class SampledTexts(TokenTexts):
    """`TokenTexts` of a generation; the token that ended it shows only what the text shows."""

    def __init__(self, tokenizer: Any, state: GenerationState) -> None:
        params = state.params
        super().__init__(
            tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            context_ids=state.context,
        )
        self._tokenizer = tokenizer
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

    def chat_logprobs(
        self, ids: Sequence[int], scores: Sequence[dict[int, Logprob]], num_top: int
    ) -> dict[str, Any]:
        """``choices[i].logprobs`` of /v1/chat/completions, for the next tokens."""
        tokenizer = self._tokenizer
        content = []
        for token, text, entries in zip(ids, self.append(ids), scores):
            own = _entry(tokenizer, token, text, entries[token], is_in_text=True)
            top = [
                own
                if other == token
                else _entry(tokenizer, other, entry.decoded_token or "", entry)
                for other, entry in (_likeliest(token, entries, num_top) if num_top else ())
            ]
            content.append({**own, "top_logprobs": top})
        return {"content": content, "refusal": None}


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
        names = {token: text}  # as among the tokens, so that it is found by that name
        top: dict[str, float] = {}
        for other, entry in _likeliest(token, entries, self._num_top):
            name = f"token_id:{other}" if self._as_ids else entry.decoded_token or ""
            if other != token and (name == text or name in top):
                name = f"token_id:{other}"
            top[names.get(other, name)] = _finite(entry.logprob)
        return top


def _likeliest(token: int, entries: dict[int, Logprob], num_top: int) -> list[tuple[int, Logprob]]:
    """The `num_top` likeliest, and the sampled token where it is not among them."""
    ranked = sorted(entries.items(), key=lambda item: item[1].rank or 1 << 31)
    return [
        (other, entry)
        for place, (other, entry) in enumerate(ranked)
        if place < num_top or other == token
    ]


def _entry(
    tokenizer: Any, token: int, text: str, entry: Logprob, *, is_in_text: bool = False
) -> dict[str, Any]:
    """A token with its own bytes; null where the tokenizer does not tell them.

    At the start of a text a token may have lost its dummy space: `is_in_text`, and so its bytes.
    """
    known = None if tokenizer is None else tokenizer.token_bytes(token)
    if is_in_text and text and known == b" " + text.encode("utf-8", "replace"):
        known = known[1:]
    return {
        "token": text,
        "logprob": _finite(entry.logprob),
        "bytes": None if known is None else list(known),
    }


def _finite(logprob: float) -> float:
    """JSON has no infinity; a token of probability 0 gets what OpenAI gives."""
    return max(float(logprob), -9999.0)
