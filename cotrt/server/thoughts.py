"""Whether a model thinks before it answers, and where the reply to a prompt begins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from cotrt.errors import InvalidRequestError
from cotrt.options.tags import THINK, THINK_END
from cotrt.program.reply_parser import ReplyParser, is_opened

_PROBE = [{"role": "user", "content": "Hi"}]


class Thoughts:
    """What the tokenizer's chat template says about thinking.

    Attributes:
        are_read: the server splits thoughts off.
        may_come: the model may open a thought itself: it knows the tag, and its template does not
            open one.
    """

    def __init__(self, tokenizer: Any, parser: str) -> None:
        self.are_read = parser == "think"
        self.may_come = False
        if not self.are_read or tokenizer is None:
            return
        templates = "".join(tokenizer.chat_templates.values())
        if THINK in tokenizer.added_ids or THINK in templates or THINK_END in templates:
            try:
                self.may_come = not is_opened(tokenizer.render_chat(_PROBE))
            except InvalidRequestError:  # a template that wants more of a conversation
                self.may_come = True

    def before_grammar(
        self, prompt: str, reader: ReplyParser, *, is_off: bool
    ) -> Literal["open", "optional"] | None:
        """What may come before a grammar begins.

        Args:
            prompt: its text, as the template wrote it.
            reader: at the beginning of the reply.
            is_off: the request turns thinking off.
        """
        if reader.in_thought:
            return "open"
        if not (self.may_come and reader.may_think) or is_off:
            return None
        return None if prompt.rstrip().endswith(THINK_END) else "optional"


def new_reader(prompt: str, continued: Mapping[str, Any] | None, **options: Any) -> ReplyParser:
    """A reader of a reply, in the state that its prompt ends in.

    Args:
        prompt: its text, as the template wrote it.
        continued: the last message, where the reply goes on inside it.
        **options: of `ReplyParser`.
    """
    if continued is None:
        return ReplyParser(opened=is_opened(prompt), **options)
    said = text_of(continued.get("content"))
    thought = text_of(continued.get("reasoning_content") or continued.get("reasoning"))
    if thought and not said and prompt.rstrip().endswith(thought.rstrip()):
        reader = ReplyParser(opened=True, **options)
        reader.prime(thought)
        return reader
    # A template may leave the thought of an earlier message out: then nothing opened it anew.
    kept = prompt.rstrip().endswith(said.rstrip())
    before = prompt.rstrip()[: len(prompt.rstrip()) - len(said.rstrip())]
    reader = ReplyParser(opened=kept and is_opened(before), **options)
    reader.prime(said)
    return reader


def text_of(content: Any) -> str:
    """A message's content as text."""
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content)
    return content if isinstance(content, str) else ""
