"""Texts of nodes: as a generate would show them, exact where a node ends inside a character."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cotrt.options.sampling import SamplingParams
from cotrt.sampling.output_text import OutputText
from cotrt.sampling.token_texts import TokenTexts


def shown_text(
    tokenizer: Any,
    ids: Sequence[int],
    before: Sequence[int],
    params: SamplingParams,
    *,
    ended_by_token: bool = False,
    stop: str | None = None,
) -> tuple[str, str]:
    """Text of a node's tokens, by the rules of a generate's text.

    Args:
        tokenizer: of the model; None gives no text.
        ids: the tokens.
        before: those before them; the last NUM_CONTEXT_IDS are enough.
        params: for ``skip_special_tokens`` and ``include_stop_str_in_output``.
        ended_by_token: the last token ended the generate.
        stop: the stop string that the last token completed, or None.

    Returns:
        The text, and what an incomplete character at its end shows where nothing follows.
    """
    if tokenizer is None:
        return "", ""
    rules = SamplingParams(
        stop=() if stop is None else (stop,),
        # The stop string ends in the last token: the same characters before it were no stop.
        min_tokens=0 if stop is None else len(ids) - 1,
        max_tokens=None,
        skip_special_tokens=params.skip_special_tokens,
        include_stop_str_in_output=params.include_stop_str_in_output,
    )
    made = OutputText(tokenizer, rules, before)
    made.append_all(ids, ended_by_token=ended_by_token)
    text = made.text
    made.finish()
    return text, made.text[len(text) :]


def token_texts(
    tokenizer: Any, ids: Sequence[int], before: Sequence[int] = (), *, skips: bool = False
) -> list[str]:
    """One text a token; joined they are the text, an incomplete character at the end left out.

    A token inside a character of several tokens has the text "", the last one the character.

    Args:
        tokenizer: of the model; None gives empty texts.
        ids: tokens.
        before: those before them; the last NUM_CONTEXT_IDS are enough.
        skips: the text leaves special tokens out; each still has its spelling here.
    """
    texts = TokenTexts(tokenizer, skip_special_tokens=skips, context_ids=before).append(ids)
    if skips and tokenizer is not None:
        special = tokenizer.all_special_ids
        for place, token in enumerate(ids):
            if token in special:
                texts[place] = tokenizer.token_text(token)
    return texts


def ends_inside_stop(text: str, stops: Sequence[str]) -> bool:
    """The text ends with the beginning of a stop string, or inside a character."""
    if text.endswith("�"):
        return True
    return any(text.endswith(stop[:length]) for stop in stops for length in range(1, len(stop)))


def find_stop(text: str, fresh: int, stops: Sequence[str]) -> str | None:
    """The stop string that ends first among those that end in the last `fresh` characters."""
    best: tuple[int, str] | None = None
    for stop in stops:
        at = text.find(stop, max(0, len(text) - fresh - len(stop) + 1))
        if at >= 0 and (best is None or at + len(stop) < best[0]):
            best = (at + len(stop), stop)
    return best[1] if best else None
