"""What a request asks for: SamplingParams, BeamSearchParams, StructuredOutputs.

All three are frozen and strict: an int is a float, but strings and bools are not numbers, NaN and
infinity are refused, and an unknown field is an error. A ``pydantic.ValidationError`` (which is a
``ValueError``) names the field, the value and the range.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from cotrt.options.numbers import plain_float, plain_int

if TYPE_CHECKING:
    from typing_extensions import Self

MAX_STOPS = 64
MAX_LOGPROBS = 20
MAX_NUM_TOKENS = 2**31 - 1


def first_problem(error: ValidationError) -> tuple[str, str]:
    """The first field that is wrong, "a.b" within others, and what is said of it."""
    first = error.errors(include_url=False, include_context=False)[0]
    return ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")


def _number(value: Any) -> Any:
    """An int is a float here; whatever is not a number is refused before pydantic converts it."""
    number = plain_float(value)
    if number is None:
        raise ValueError(f"must be a number, not {type(value).__name__} {value!r}")
    if isinstance(number, float) and not math.isfinite(number):
        raise ValueError(f"must be a finite number, not {value!r}")
    return number


def _integer(value: Any) -> Any:
    number = plain_int(value)
    if number is None:
        raise ValueError(f"must be an int, not {type(value).__name__} {value!r}")
    return number


def _flag(value: Any) -> Any:
    if not isinstance(value, bool):
        raise ValueError(f"must be True or False, not {type(value).__name__} {value!r}")
    return value


def _within(low: float, high: float, *, open_low: bool = False) -> AfterValidator:
    interval = f"{'(' if open_low else '['}{low}, {high}]"

    def check(value: float) -> float:
        if not low <= value <= high or (open_low and value == low):
            raise ValueError(f"must be in {interval}, not {value!r}")
        return value

    return AfterValidator(check)


def _texts(value: Any) -> Any:
    """A str is a tuple of one, a list a tuple, None an empty one; no text in it is empty."""
    if value is None:
        return ()
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"must be a str or a list of str, not {value!r}")
    if "" in texts:
        raise ValueError(f"must not hold an empty string: {value!r}")
    for text in texts:
        _whole_text(text)
    return tuple(texts)


def _whole_text(value: Any) -> Any:
    """Refuse a str, or a str in JSON data, that has no UTF-8 form: no output could match it."""
    waiting, seen = [value], set()
    while waiting:
        each = waiting.pop()
        if isinstance(each, (dict, list, tuple)):
            if id(each) in seen:
                continue
            seen.add(id(each))
        if isinstance(each, str):
            try:
                each.encode("utf-8")
            except UnicodeEncodeError:
                raise ValueError(f"must not hold half of a surrogate pair: {each!r:.80}") from None
        elif isinstance(each, dict):
            waiting += [*each.keys(), *each.values()]
        elif isinstance(each, (list, tuple)):
            waiting += each
    return value


def _ids(value: Any) -> Any:
    if value is None:
        return ()
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"must be a list of token ids, not {value!r}")
    return tuple(value)


def _off_is_zero(top_k: int) -> int:
    return max(top_k, 0)


def _at_most(limit: int) -> AfterValidator:
    def check(value: tuple[str, ...]) -> tuple[str, ...]:
        if len(value) > limit:
            raise ValueError(f"must hold at most {limit} strings, not {len(value)}")
        return value

    return AfterValidator(check)


def _some_ids(value: Any) -> Any:
    if value is not None and not _ids(value):
        raise ValueError("must name at least one token id, or be None to allow all")
    return value if value is None else _ids(value)


Number = Annotated[float, BeforeValidator(_number)]
Integer = Annotated[int, BeforeValidator(_integer)]
Flag = Annotated[bool, BeforeValidator(_flag)]
TokenId = Annotated[int, _within(0, MAX_NUM_TOKENS), BeforeValidator(_integer)]
Text = Annotated[str, BeforeValidator(_whole_text)]
Texts = Annotated[tuple[str, ...], BeforeValidator(_texts)]
Stops = Annotated[tuple[str, ...], _at_most(MAX_STOPS), BeforeValidator(_texts)]
TokenIds = Annotated[tuple[TokenId, ...], BeforeValidator(_ids)]
SomeTokenIds = Annotated[tuple[TokenId, ...] | None, BeforeValidator(_some_ids)]


class _Params(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, checked like a new one.

        Raises:
            pydantic.ValidationError: for a bad value or an unknown field.
        """
        fields = type(self).model_fields
        given = {fields[name].alias or name: getattr(self, name) for name in self.model_fields_set}
        return type(self)(**(given | changes))


class StructuredOutputs(_Params):
    """A grammar that the output must follow; exactly one of json, regex, choice, grammar is given.

    Attributes:
        json: a JSON schema, as a dict or as text. Keywords that cannot be held to while sampling
            (``uniqueItems``, say) are let pass.
        regex: a regular expression that the whole output matches; backslash d is ``[0-9]``.
        choice: the strings of which the output is one.
        grammar: a context-free grammar in Lark's or GBNF's notation.
        thought: "open": the prompt has opened a thought, and the grammar begins after its
            ``</think>``; "optional": a whole ``<think>...</think>`` may come first. The thought is
            closed where the model would end the output in it, and where `max_tokens` leaves no
            more than a quarter (and no more than 256 tokens) for what follows.
    """

    json_schema: Annotated[dict[str, Any] | str | None, BeforeValidator(_whole_text)] = Field(
        default=None, alias="json"
    )
    regex: Text | None = None
    choice: Texts | None = None
    grammar: Text | None = None
    thought: Literal["open", "optional"] | None = None

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """What was given, by the constructor's own names."""
        for name, value in super().__repr_args__():
            if value is not None:
                yield "json" if name == "json_schema" else name, value

    @model_validator(mode="after")
    def _exactly_one(self) -> StructuredOutputs:
        named = {
            "json": self.json_schema,
            "regex": self.regex,
            "choice": self.choice,
            "grammar": self.grammar,
        }
        given = [name for name, value in named.items() if value is not None]
        if len(given) != 1:
            raise ValueError(
                f"give exactly one of json, regex, choice and grammar, not {given or 'none'}"
            )
        if self.choice is not None and not self.choice:
            raise ValueError("choice must name at least one string")
        return self


class SamplingParams(_Params):
    """How to sample.

    ``max_tokens`` that was never given (``is_max_tokens_set`` is False) means 16 in
    ``llm.generate`` and no limit elsewhere; ``None`` is no limit everywhere.

    Attributes:
        n: outputs a prompt, 1 to 1024.
        temperature: 0 to 100; 0 is greedy.
        top_p: (0, 1]; the smallest set of likeliest tokens whose mass reaches it.
        top_k: the k likeliest tokens; 0 (or -1, kept as 0) is off.
        min_p: [0, 1]; tokens at least this likely, relative to the likeliest.
        presence_penalty: -2 to 2, taken off the logit of each token generated so far.
        frequency_penalty: -2 to 2, taken off once for each time that it was generated.
        repetition_penalty: (0, 10]; divides the positive and multiplies the negative logits of
            tokens of the prompt and the output.
        seed: -2^63 to 2^64 - 1; None draws by the branch's own seed.
        max_tokens: 0 to 2^31 - 1, None for no limit; 0 samples nothing.
        min_tokens: no end-of-sequence or stop token before this many tokens.
        stop: up to 64 strings that end the text; a str or a list, kept as a tuple.
        stop_token_ids: token ids that end it, kept as a tuple.
        include_stop_str_in_output: keep the stop string in the text.
        ignore_eos: go on after an end-of-sequence token.
        logit_bias: token id to a number from -100 to 100 that is added to its logit.
        allowed_token_ids: the only ids that may be sampled; None for all.
        bad_words: texts whose tokens, with or without a space before them, may not come out one
            after the other.
        logprobs: 0 to 20: the sampled token's logprob and so many of the likeliest.
        prompt_logprobs: 0 to 20: the same for the prompt's tokens.
        skip_special_tokens: leave special tokens out of the text.
        structured_outputs: a grammar that the output follows to its end. Beside it ``stop`` and
            ``stop_token_ids`` end nothing, for they could cut the output inside its grammar, and
            ``bad_words`` are banned where the grammar leaves another token. ``ignore_eos`` and
            ``allowed_token_ids`` do not go with it.
        priority: smaller goes first.
    """

    n: Annotated[Integer, _within(1, 1024)] = 1
    temperature: Annotated[Number, _within(0, 100)] = 1.0
    top_p: Annotated[Number, _within(0, 1, open_low=True)] = 1.0
    top_k: Annotated[Integer, _within(-1, MAX_NUM_TOKENS), AfterValidator(_off_is_zero)] = 0
    min_p: Annotated[Number, _within(0, 1)] = 0.0
    presence_penalty: Annotated[Number, _within(-2, 2)] = 0.0
    frequency_penalty: Annotated[Number, _within(-2, 2)] = 0.0
    repetition_penalty: Annotated[Number, _within(0, 10, open_low=True)] = 1.0
    seed: Annotated[Integer, _within(-(2**63), 2**64 - 1)] | None = None
    max_tokens: Annotated[Integer, _within(0, MAX_NUM_TOKENS)] | None = None
    min_tokens: Annotated[Integer, _within(0, MAX_NUM_TOKENS)] = 0
    stop: Stops = ()
    stop_token_ids: TokenIds = ()
    include_stop_str_in_output: Flag = False
    ignore_eos: Flag = False
    logit_bias: dict[TokenId, Annotated[Number, _within(-100, 100)]] | None = None
    allowed_token_ids: SomeTokenIds = None
    bad_words: Texts = ()
    logprobs: Annotated[Integer, _within(0, MAX_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[Integer, _within(0, MAX_LOGPROBS)] | None = None
    skip_special_tokens: Flag = True
    structured_outputs: StructuredOutputs | None = None
    priority: Annotated[Integer, _within(-(2**63), 2**63 - 1)] = 0

    @property
    def is_max_tokens_set(self) -> bool:
        """Whether ``max_tokens`` was given, be it as None."""
        return "max_tokens" in self.model_fields_set

    @model_validator(mode="after")
    def _check_together(self) -> SamplingParams:
        if self.structured_outputs is not None:
            for name in ("ignore_eos", "allowed_token_ids"):
                if getattr(self, name):
                    raise ValueError(
                        f"{name} does not go with structured_outputs, whose grammar says which "
                        "tokens may come and where the output ends: leave one of them out"
                    )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must be at most max_tokens={self.max_tokens}, not {self.min_tokens}"
            )
        return self


class BeamSearchParams(_Params):
    """How to search with beams.

    Attributes:
        beam_width: 1 to 1024 beams kept, and sequences returned.
        max_tokens: 1 to 2^31 - 1 generated tokens a sequence.
        length_penalty: exponent of the generated length that divides a sequence's logprob.
        ignore_eos: go on after an end-of-sequence token.
        temperature: 0 to 100, divides logits before log-softmax; 0 means 1.
    """

    beam_width: Annotated[Integer, _within(1, 1024)]
    max_tokens: Annotated[Integer, _within(1, MAX_NUM_TOKENS)]
    length_penalty: Annotated[Number, _within(-100, 100)] = 1.0
    ignore_eos: Flag = False
    temperature: Annotated[Number, _within(0, 100)] = 0.0
