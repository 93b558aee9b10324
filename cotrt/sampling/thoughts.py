"""A thought before a grammar: text that is free until its closing tag has come."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from cotrt.options.tags import THINK, THINK_END

# A thought is closed where no more than a quarter of an output, nor more tokens than this, is left.
MAX_RESERVE = 256

_WHITE = "white: /[ \\t\\r\\n]{0,4}/\n"


def tag_term(tag: str, added: Mapping[str, int]) -> str:
    """A tag in Lark's notation: its token where there is one, for text never matches that."""
    return f"<[{added[tag]}]>" if tag in added else json.dumps(tag)


class ThoughtGrammar:
    """A grammar that begins after a thought, and what tells where the thought begins and ends.

    Args:
        source: the grammar of the answer, in llguidance's own form.
        is_open: the prompt has opened the thought; else one may come first.
        tokenizer: of the model.
        compile_source: makes a matcher of a grammar.
        special: ids of tokens that are no text and do not end an output.

    Attributes:
        start: the matcher at the output's beginning.
        inside: the matcher at the beginning of a thought.
        thought: one that accepts when a thought has ended.
        opening: one that accepts when a thought has begun; None where it has.
        special: ids that a thought may hold beside text.
        closing: the closing tag's ids.
    """

    def __init__(
        self,
        source: str,
        is_open: bool,
        tokenizer: Any,
        compile_source: Callable[[str], Any],
        special: npt.NDArray[np.int64],
    ) -> None:
        added = tokenizer.added_ids
        thought = f"late[suffix={json.dumps(THINK_END)}]: /(?s:.*)/\n"
        if THINK_END in added:
            thought += f"thought: late | /(?s:.*)/ {tag_term(THINK_END, added)}\n"
        else:
            thought += "thought: late\n"
        head = f"{thought}{_WHITE}open: white {tag_term(THINK, added)}\n"
        answer = "thought white @answer"
        self.inside = compile_source(_joined(f"start: {answer}\n{head}", source))
        self.thought = compile_source(_joined(f"start: thought\n{thought}"))
        self.start, self.opening = self.inside, None
        if not is_open:
            first = f"start: open {answer} | @answer\n{head}"
            self.start = compile_source(_joined(first, source))
            self.opening = compile_source(_joined(f"start: open rest\nrest: /(?s:.*)/\n{head}"))
        ends = {added[tag] for tag in (THINK, THINK_END) if tag in added}
        self.special = np.array([i for i in special.tolist() if i not in ends], np.int64)
        self.closing: list[int] = (
            [added[THINK_END]] if THINK_END in added else tokenizer.encode_continuation(THINK_END)
        )


def _joined(first: str, answer: str | None = None) -> str:
    """One grammar of a Lark text and the grammar that it names @answer."""
    grammars: list[dict[str, Any]] = [{"name": "whole", "lark_grammar": first}]
    if answer is not None:
        if answer.lstrip().startswith("{"):
            grammars.append({**json.loads(answer)["grammars"][0], "name": "answer"})
        else:
            grammars.append({"name": "answer", "lark_grammar": answer})
    return json.dumps({"grammars": grammars})


class ThoughtState:
    """Where one generate stands before its answer.

    Attributes:
        phase: "start" (a thought may begin), "thought", or "answer".

    Args:
        grammar: with the thought.
        limit: tokens that the output may have.
    """

    def __init__(self, grammar: ThoughtGrammar, limit: int) -> None:
        self._grammar = grammar
        self._opening = None if grammar.opening is None else grammar.opening.deep_copy()
        self._thought = grammar.thought.deep_copy()
        self.phase = "thought" if grammar.opening is None else "start"
        self._closing: list[int] = []
        self._last = limit - max(1, min(MAX_RESERVE, limit // 4)) - len(grammar.closing)
        self._num_read = 0

    def read(self, token: int, matcher: Any) -> Any:
        """Takes a token.

        Returns:
            The matcher to go on with, which has read it.
        """
        self._num_read += 1
        if self._closing and token == self._closing[0]:
            del self._closing[0]
        if self.phase == "start":
            assert self._opening is not None
            if self._opening.try_consume_tokens([token]) != 1:
                self.phase = "answer"
            elif self._opening.is_accepting():
                self.phase = "thought"
            matcher.consume_token(token)
            return matcher
        if matcher.try_consume_tokens([token]) != 1:  # a special token
            self._thought = self._grammar.thought.deep_copy()
            return self._grammar.inside.deep_copy()
        if self._thought.try_consume_tokens([token]) != 1 or self._thought.is_accepting():
            self.phase = "answer"
        return matcher

    @property
    def special(self) -> npt.NDArray[np.int64]:
        """Ids that a thought may hold beside text."""
        return self._grammar.special

    def must_close(self, would_end: bool) -> int | None:
        """The id that closes the thought now, where it has to be closed.

        Args:
            would_end: the model would end the output here.
        """
        if self.phase != "thought":
            return None
        if not self._closing and (would_end or self._num_read >= self._last):
            self._closing = list(self._grammar.closing)
        return self._closing[0] if self._closing else None
