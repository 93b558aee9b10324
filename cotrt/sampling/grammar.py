"""Grammars that an output must follow: a mask of tokens for every draw, by llguidance.

A `Grammar` is compiled once; each generate has a `GrammarState`, a copy of its matcher that reads
the sampled tokens as they come. A position in a grammar is nothing but the tokens since it began,
so a fork, a rollback or a preemption needs no matcher of its own: `GrammarState.resume` reads the
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
from cotrt.options.sampling import StructuredOutputs

if TYPE_CHECKING:
    import torch

_MAX_COMPILED = 64
# Unbounded white space is where small models get lost for ever.
_JSON_OPTIONS: Any = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{0,16}"}


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
                f"structured_outputs: json is no JSON data: {error}"
            ) from None
        with self._lock:
            if key in self._compiled:
                self._compiled.move_to_end(key)
                return self._compiled[key]
        from llguidance import LLMatcher

        matcher = LLMatcher(self._reader, _source(wanted), log_level=0)
        if not matcher.is_error():
            # Much of what it cannot hold it finds out by the first mask only: better here, in the
            # caller's thread and for the caller alone, than between two steps.
            first = matcher.deep_copy()
            first.compute_bitmask()
            matcher = first if first.is_error() else matcher
        if matcher.is_error():
            raise InvalidRequestError(f"structured_outputs: {_words(matcher)}")
        grammar = Grammar(matcher, self._vocab_size, np.array(self._eos))
        with self._lock:
            self._compiled[key] = grammar
            while len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        return grammar


class Grammar:
    """A compiled grammar at its beginning; it never changes."""

    def __init__(self, matcher: Any, vocab_size: int, eos: npt.NDArray[np.int64]) -> None:
        self.matcher = matcher
        self.vocab_size = vocab_size
        self.eos = eos


class GrammarState:
    """One generate's position in a grammar.

    Attributes:
        error: what llguidance said when the grammar grew beyond what it can hold; else None.

    Args:
        grammar: the grammar.
        generated: the live list of sampled ids; it may only grow, and what it holds now came
            before this generate.
        before: ids that this grammar has read already, in an earlier generate.
    """

    def __init__(self, grammar: Grammar, generated: list[int], before: Sequence[int] = ()) -> None:
        self._grammar = grammar
        self._matcher = grammar.matcher.deep_copy()
        self._generated = generated
        self._num_read = len(generated)
        self.error: str | None = None
        if before:
            self._matcher.consume_tokens(list(before))

    @staticmethod
    def can_resume(grammar: Grammar, ids: Sequence[int]) -> bool:
        """`ids` are the beginning of an output, and more may follow."""
        matcher = grammar.matcher.deep_copy()
        return matcher.try_consume_tokens(list(ids)) == len(ids) and not matcher.is_stopped()

    def mask(self, logits: torch.Tensor) -> None:
        """Bans what the grammar does not allow next.

        Args:
            logits: float32 ``[V]``, changed in place.
        """
        import torch

        allowed = torch.from_numpy(self.allowed()).to(logits.device)
        logits.masked_fill_(~allowed, -torch.inf)

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Which tokens may come next, bool ``[V]``; none at all after an error."""
        matcher, grammar = self._matcher, self._grammar
        new = self._generated[self._num_read :]
        self._num_read += len(new)
        for token in new:
            # The token that ends a complete output is the last one.
            if not matcher.is_stopped() and not matcher.consume_token(token):
                break
        allowed = np.zeros(grammar.vocab_size, np.bool_)
        if matcher.is_error():
            self.error = _words(matcher)
        elif matcher.is_stopped():
            allowed[grammar.eos] = True
        else:
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            known = np.unpackbits(bits, bitorder="little")[: grammar.vocab_size]
            allowed[: len(known)] = known
            allowed[grammar.eos] = matcher.is_accepting()
        return allowed


def _source(wanted: StructuredOutputs) -> str:
    """The grammar in llguidance's own form."""
    from llguidance import LLMatcher, grammar_from

    try:
        if wanted.json_schema is not None:
            schema = wanted.json_schema
            given = json.loads(schema) if isinstance(schema, str) else schema
            if not isinstance(given, dict):
                raise ValueError("a JSON schema is an object")
            return LLMatcher.grammar_from_json_schema(given, _JSON_OPTIONS)
        if wanted.regex is not None:
            return grammar_from("regex", wanted.regex)
        if wanted.choice is not None:
            return _one_of(wanted.choice)
        return grammar_from("grammar", wanted.grammar or "")
    except Exception as error:
        raise InvalidRequestError(f"structured_outputs: {error}"[:500]) from error


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
