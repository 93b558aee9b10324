"""Grammars that an output must follow: a mask of tokens for every draw, by llguidance.

A `Grammar` is compiled once; each generate has a `GrammarState`, a copy of its matcher that reads
the sampled tokens as they come. A position in a grammar is nothing but the tokens since it began,
so a fork, a rollback or a preemption needs no matcher of its own: a new `GrammarState` reads the
branch's own tokens again, in microseconds each.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cotrt.errors import InvalidRequestError
from cotrt.options.sampling import MAX_NUM_TOKENS, StructuredOutputs

from .thoughts import ThoughtGrammar, ThoughtState

if TYPE_CHECKING:
    import torch

_MAX_COMPILED = 64
# White space is where small models get lost for ever: one space after a comma or a colon, or none.
# Keywords that cannot be held to while sampling are let pass.
JSON_OPTIONS: Any = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "lenient": True,
}
_FIELD = "structured_outputs"


class GrammarCompiler:
    """Compiles grammars for one tokenizer, and keeps the last ones; safe in several threads.

    Args:
        tokenizer: of the model.
        vocab_size: width of the logits.
        eos_token_ids: ids that end a sequence; a complete output ends by one of them.

    Raises:
        InvalidRequestError: there is no tokenizer, no end-of-sequence id, or no llguidance.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        if tokenizer is None:
            raise InvalidRequestError("structured_outputs needs a tokenizer: give tokenizer=")
        self._eos = sorted(i for i in eos_token_ids if i < vocab_size)
        if not self._eos:
            raise InvalidRequestError(
                "structured_outputs needs an end-of-sequence token, and this model names none"
            )
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, Grammar] = OrderedDict()
        self._reader = _reader(tokenizer, vocab_size, self._eos)

    def compile(self, wanted: StructuredOutputs) -> Grammar:
        """The grammar of a request.

        Raises:
            InvalidRequestError: it is not valid, or more than llguidance can hold.
        """
        try:
            key = wanted.model_dump_json(by_alias=True)
        except ValueError as error:  # objects in the schema, or one that holds itself
            raise InvalidRequestError(
                f"{_FIELD}: json is no JSON data: {error}", field=_FIELD
            ) from None
        with self._lock:
            if key in self._compiled:
                self._compiled.move_to_end(key)
                return self._compiled[key]
        grammar = self._made(wanted)
        with self._lock:
            self._compiled[key] = grammar
            while len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        return grammar

    def _made(self, wanted: StructuredOutputs) -> Grammar:
        source, eos = _source(wanted), np.array(self._eos)
        thoughts = None
        if wanted.thought is not None:
            added = set(self._tokenizer.added_ids.values()) - set(self._eos)
            special = np.array(sorted(i for i in added if i < self._vocab_size), np.int64)
            thoughts = ThoughtGrammar(
                source, wanted.thought == "open", self._tokenizer, self._matcher, special
            )
        # The answer's own first: its faults are the request's.
        matcher = self._matcher(source)
        grammar = Grammar(matcher, self._vocab_size, eos)
        if not GrammarState(grammar, []).allowed().any():
            raise InvalidRequestError(
                f"{_FIELD}: no token can begin an output of this grammar: simplify it",
                field=_FIELD,
            )
        if thoughts is not None:
            grammar = Grammar(thoughts.start, self._vocab_size, eos, thoughts)
        return grammar

    def _matcher(self, source: str) -> Any:
        from llguidance import LLMatcher

        matcher = LLMatcher(self._reader, source, log_level=0)
        if not matcher.is_error():
            # Much of what it cannot hold it finds out by the first mask only: better here, in the
            # caller's thread and for the caller alone, than between two steps.
            first = matcher.deep_copy()
            first.compute_bitmask()
            matcher = first if first.is_error() else matcher
        if matcher.is_error():
            raise InvalidRequestError(f"{_FIELD}: {_words(matcher)}", field=_FIELD)
        return matcher


class Grammar:
    """A compiled grammar at its beginning; it never changes.

    Attributes:
        matcher: at the output's beginning.
        vocab_size: width of the logits.
        eos: ids that end an output.
        thoughts: the thought before it, or None.
    """

    def __init__(
        self,
        matcher: Any,
        vocab_size: int,
        eos: npt.NDArray[np.int64],
        thoughts: ThoughtGrammar | None = None,
    ) -> None:
        self.matcher = matcher
        self.vocab_size = vocab_size
        self.eos = eos
        self.thoughts = thoughts


class GrammarState:
    """One generate's position in a grammar.

    Attributes:
        error: why no token can come, for the last mask; else None.

    Args:
        grammar: the grammar.
        generated: the live list of sampled ids; it may only grow, and what it holds now came
            before this generate.
        before: ids that this grammar has read already, in an earlier generate.
        limit: tokens that this generate may sample.
    """

    def __init__(
        self,
        grammar: Grammar,
        generated: list[int],
        before: Sequence[int] = (),
        limit: int = MAX_NUM_TOKENS,
    ) -> None:
        self._grammar = grammar
        self._matcher = grammar.matcher.deep_copy()
        self._generated = generated
        self._num_read = len(generated)
        self._thought = None
        if grammar.thoughts is not None:
            self._thought = ThoughtState(grammar.thoughts, limit + len(before))
        self.error: str | None = None
        for token in before:
            self._read(token)

    @staticmethod
    def can_resume(grammar: Grammar, ids: Sequence[int]) -> bool:
        """`ids` are the beginning of an output, and more may follow."""
        state = GrammarState(grammar, [])
        for token in ids:
            if state._matcher.is_stopped() or not state._read(token):
                return False
        return not state._matcher.is_stopped()

    def mask(self, logits: torch.Tensor) -> None:
        """Bans what the grammar does not allow next.

        Args:
            logits: float32 ``[V]``, changed in place.
        """
        import torch

        self.error = None
        self._catch_up()
        if self._thought is not None and self._thought.phase == "thought":
            would_end = int(logits.argmax()) in self._grammar.eos
            closing = self._thought.must_close(would_end)
            if closing is not None:
                # The model may give it no chance at all; it comes all the same.
                value = logits[closing].clamp(min=-1e4)
                logits.fill_(-torch.inf)[closing] = value
                return
        allowed = torch.from_numpy(self.allowed()).to(logits.device)
        logits.masked_fill_(~allowed, -torch.inf)
        if self.error is None and bool(logits.amax() == -torch.inf):
            self.error = (
                "has a dead end: what may follow has no chance by the model and the other fields"
                if allowed.any()
                else "has a dead end: no token of the vocabulary may follow"
            )

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Which tokens may come next, bool ``[V]``; none at all after an error."""
        self._catch_up()
        matcher, grammar = self._matcher, self._grammar
        allowed = np.zeros(grammar.vocab_size, np.bool_)
        if matcher.is_error():
            self.error = f"grew beyond what llguidance holds: {_words(matcher)}"
        elif matcher.is_stopped():
            allowed[grammar.eos] = True
        else:
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            if matcher.is_error():
                self.error = f"grew beyond what llguidance holds: {_words(matcher)}"
                return allowed
            known = np.unpackbits(bits, bitorder="little")[: grammar.vocab_size]
            allowed[: len(known)] = known
            if self._thought is not None and self._thought.phase == "thought":
                allowed[self._thought.special] = True
                allowed[grammar.eos] = False
            else:
                allowed[grammar.eos] = matcher.is_accepting()
        return allowed

    def _catch_up(self) -> None:
        new = self._generated[self._num_read :]
        self._num_read += len(new)
        for token in new:
            # The token that ends a complete output is the last one.
            if not self._matcher.is_stopped() and not self._read(token):
                break

    def _read(self, token: int) -> bool:
        if self._thought is not None and self._thought.phase != "answer":
            self._matcher = self._thought.read(token, self._matcher)
            return not self._matcher.is_error()
        return bool(self._matcher.consume_token(token))


def _source(wanted: StructuredOutputs) -> str:
    """The grammar in llguidance's own form."""
    from llguidance import LLMatcher, grammar_from

    try:
        if wanted.json_schema is not None:
            schema = wanted.json_schema
            given = json.loads(schema) if isinstance(schema, str) else schema
            if not isinstance(given, dict):
                raise ValueError("a JSON schema is an object")
            return LLMatcher.grammar_from_json_schema(given, JSON_OPTIONS)
        if wanted.regex is not None:
            return grammar_from("regex", ascii_digits(wanted.regex))
        if wanted.choice is not None:
            return _one_of(wanted.choice)
        return grammar_from("grammar", wanted.grammar or "")
    except Exception as error:
        raise InvalidRequestError(f"{_FIELD}: {error}"[:500], field=_FIELD) from error


def ascii_digits(pattern: str) -> str:
    """The pattern, its digit classes those of ASCII; llguidance takes those of all scripts."""
    out: list[str] = []
    depth, at = 0, 0  # of brackets
    while at < len(pattern):
        here = pattern[at : at + 2]
        if here[0] == "\\":
            if here == "\\d":
                here = "0-9" if depth else "[0-9]"
            elif here == "\\D":
                here = "[^0-9]"
            out.append(here)
            at += 2
            continue
        if here[0] == "[":
            depth += 1
        elif here[0] == "]" and depth and not _opens_class(out):
            depth -= 1
        out.append(here[0])
        at += 1
    return "".join(out)


def _opens_class(out: list[str]) -> bool:
    """A bracket that closes stands first in its class, where it is a plain character."""
    return out[-1:] == ["["] or out[-2:] == ["[", "^"]


def _one_of(choice: Sequence[str]) -> str:
    """A grammar of one lexeme: each string as a rule of its own would be a row of the parser."""
    return "start: CHOICE\nCHOICE: " + "\n  | ".join(json.dumps(text) for text in choice)


def _words(matcher: Any) -> str:
    """What llguidance says of its error, without the state that it prints beside it."""
    text: str = matcher.get_error().partition("\n<state>")[0].strip()
    return text[:500]


def _reader(tokenizer: Any, vocab_size: int, eos: list[int]) -> Any:
    """The vocabulary as llguidance knows it."""
    try:
        from llguidance import LLTokenizer, TokenizerWrapper
    except ModuleNotFoundError as error:
        raise InvalidRequestError(
            "structured_outputs needs llguidance: pip install 'cotrt[grammar]'"
        ) from error
    size = max(vocab_size, tokenizer.vocab_size if tokenizer.vocab_size < 1 << 24 else 0)
    source = getattr(tokenizer._codec, "_source", None)
    if isinstance(source, str):  # a tokenizer.json, whose bytes it knows better than we
        return LLTokenizer(source, size, eos)
    return LLTokenizer(TokenizerWrapper(_Vocabulary(tokenizer, vocab_size, eos)), vocab_size, eos)


class _Vocabulary:
    """A user's own tokenizer, token by token."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos: list[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos[0]
        self.bos_token_id = tokenizer.bos_token_id
        special = set(tokenizer.all_special_ids) | set(eos)
        self.special_token_ids = sorted(i for i in special if i < vocab_size)
        self.tokens = [self._bytes(i, i in special) for i in range(vocab_size)]

    def _bytes(self, token: int, is_special: bool) -> bytes:
        if is_special:
            return f"<|special_{token}|>".encode()
        # Where a tokenizer does not tell the bytes of a character's part, it cannot be matched.
        return self._tokenizer.token_bytes(token) or b""

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        ids: list[int] = self._tokenizer.encode_continuation(text)
        return ids
