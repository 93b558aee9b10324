"""Changes to logits before a draw: penalties, biases, allowed and banned tokens.

A `LogitsProcessor` is made once from a request's params and bound to each sequence that they
serve. `apply_processors` changes the logits of a whole batch with one indexed operation a kind of
change, in this order:

    repetition penalty -> presence and frequency penalties -> logit bias -> allowed tokens
    -> bad words -> min_tokens -> grammar

Presence and frequency count generated tokens only; repetition counts the prompt's as well.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from cotrt.errors import InvalidRequestError
from cotrt.options.sampling import SamplingParams

if TYPE_CHECKING:
    import torch

    from .grammar import GrammarState

Ids = npt.NDArray[np.int64]


class ContinuationEncoder(Protocol):
    """What bad_words asks of a tokenizer: the ids of text that follows other text exactly."""

    def encode_continuation(self, text: str, /) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class _Rules:
    """What a request asks for, as arrays."""

    repetition: float
    presence: float
    frequency: float
    bias_ids: Ids
    biases: npt.NDArray[np.float32]
    allowed: Ids | None
    bad_ids: frozenset[int]
    bad_sequences: tuple[tuple[int, ...], ...]
    stop_ids: Ids
    min_tokens: int


class LogitsProcessor:
    """One sequence's changes to its logits.

    Build it once a request, bind it once a sequence. The live list of generated ids that it is
    bound to may only grow: bind anew after a rollback.
    """

    def __init__(
        self,
        rules: _Rules,
        prompt_ids: Sequence[int],
        generated: list[int],
        grammar: GrammarState | None = None,
    ) -> None:
        self.rules = rules
        self.grammar = grammar
        self.generated = generated
        self._num_before = len(generated)
        self._history = _History(prompt_ids if rules.repetition != 1 else ())

    @classmethod
    def build(
        cls,
        params: SamplingParams,
        *,
        vocab_size: int,
        eos_token_ids: Collection[int],
        tokenizer: ContinuationEncoder | None,
    ) -> LogitsProcessor | None:
        """A processor bound to nothing, or None where the params change no logits.

        Args:
            params: the request's.
            vocab_size: width of the logits.
            eos_token_ids: banned before ``min_tokens``, unless ``ignore_eos``.
            tokenizer: for ``bad_words``.

        Raises:
            InvalidRequestError: a token id outside the vocabulary; bad_words without a tokenizer
                or with a word that has no tokens; allowed tokens that the bans leave nothing of.
        """
        bias = params.logit_bias or {}
        allowed = params.allowed_token_ids
        for name, ids in (("logit_bias", bias), ("allowed_token_ids", allowed or ())):
            for token_id in ids:
                if token_id >= vocab_size:
                    raise InvalidRequestError(
                        f"{name} names token id {token_id}, but the model's vocabulary ends at "
                        f"{vocab_size - 1}.",
                        field=name,
                    )
        bad_ids, bad_sequences = _bad_words(params.bad_words, tokenizer)
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_token_ids))
        stop_ids = _ids(i for i in sorted(stops) if i < vocab_size)
        rules = _Rules(
            repetition=params.repetition_penalty,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
            bias_ids=_ids(bias),
            biases=np.array(list(bias.values()), np.float32),
            allowed=None if allowed is None else _ids(sorted(set(allowed))),
            bad_ids=frozenset(i for i in bad_ids if i < vocab_size),
            bad_sequences=bad_sequences,
            stop_ids=stop_ids,
            min_tokens=params.min_tokens if len(stop_ids) else 0,
        )
        if allowed is not None:
            banned = rules.bad_ids | (set(stop_ids.tolist()) if rules.min_tokens else set())
            if banned.issuperset(allowed):
                raise InvalidRequestError(
                    f"allowed_token_ids {list(allowed)} holds only tokens that bad_words or "
                    "min_tokens ban: allow at least one more.",
                    field="allowed_token_ids",
                )
        changes = (
            (rules.repetition, rules.presence, rules.frequency) != (1, 0, 0)
            or bias
            or allowed is not None
            or bad_ids
            or bad_sequences
            or rules.min_tokens
            or params.structured_outputs is not None
        )
        return cls(rules, (), []) if changes else None

    def bind(
        self,
        prompt_ids: Sequence[int],
        generated: list[int],
        grammar: GrammarState | None = None,
    ) -> LogitsProcessor:
        """The same rules for one sequence.

        Args:
            prompt_ids: given ids, counted by the repetition penalty.
            generated: the live list of sampled ids, read at each draw; it may only grow. What
                it holds now came before this request and does not count for ``min_tokens``.
            grammar: where the request stands in its structured_outputs, or None.
        """
        return LogitsProcessor(self.rules, prompt_ids, generated, grammar)

    def history(self) -> _History:
        """Counts of all ids so far."""
        self._history.read(self.generated)
        return self._history

    @property
    def only_edits(self) -> bool:
        """Whether penalties and biases are all: no bans, no list of allowed tokens, no grammar."""
        rules = self.rules
        return (
            self.grammar is None
            and rules.allowed is None
            and not (rules.bad_ids or rules.bad_sequences or rules.min_tokens)
        )

    def penalties(self) -> tuple[float, float, float]:
        """Repetition, presence and frequency."""
        return self.rules.repetition, self.rules.presence, self.rules.frequency

    def edits(
        self,
    ) -> tuple[
        npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.float32]
    ]:
        """What penalties and biases change, of all ids so far.

        Returns:
            Distinct token ids; how often each was generated; 1 where the repetition penalty
            counts it; its bias.
        """
        history, rules = self.history(), self.rules
        ids = np.unique(np.concatenate((history.seen, history.ids, rules.bias_ids)))
        counts, seen = np.zeros(len(ids), np.int32), np.zeros(len(ids), np.int32)
        biases = np.zeros(len(ids), np.float32)
        counts[np.searchsorted(ids, history.ids)] = history.counts
        seen[np.searchsorted(ids, history.seen)] = 1
        biases[np.searchsorted(ids, rules.bias_ids)] = rules.biases
        return ids.astype(np.int32), counts, seen, biases

    def banned(self) -> list[int]:
        """Ids that may not come next."""
        rules, generated = self.rules, self.generated
        banned = list(rules.bad_ids)
        for *before, last in rules.bad_sequences:
            if generated[-len(before) :] == before:
                banned.append(last)
        if len(generated) - self._num_before < rules.min_tokens:
            banned.extend(rules.stop_ids.tolist())
        return banned


class _History:
    """Counts of generated ids and the set of all ids, in arrays that grow with the sequence."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        seen = np.unique(_ids(prompt_ids))
        self._seen, self._num_seen = seen, len(seen)
        self._prompt = set(seen.tolist())
        self._place: dict[int, int] = {}
        self._ids = np.empty(16, np.int64)
        self._counts = np.zeros(16, np.float32)
        self._num_read = 0

    def read(self, generated: list[int]) -> None:
        assert len(generated) >= self._num_read, "generated ids were taken back: bind anew"
        for token_id in generated[self._num_read :]:
            place = self._place.setdefault(token_id, len(self._place))
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[place] = token_id
            self._counts[place] += 1
            if self._counts[place] == 1 and token_id not in self._prompt:
                if self._num_seen == len(self._seen):
                    self._seen = np.concatenate(
                        [self._seen, np.empty(len(self._seen) + 16, np.int64)]
                    )
                self._seen[self._num_seen] = token_id
                self._num_seen += 1
        self._num_read = len(generated)

    @property
    def seen(self) -> Ids:
        """Distinct ids of prompt and output."""
        return self._seen[: self._num_seen]

    @property
    def ids(self) -> Ids:
        """Distinct ids of the output."""
        return self._ids[: len(self._place)]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        """How often each of ``ids`` was generated."""
        return self._counts[: len(self._place)]


def apply_processors(
    logits: torch.Tensor, processors: Sequence[LogitsProcessor], *, ban: bool = True
) -> None:
    """Changes row i of the logits as processor i asks.

    Args:
        logits: float32 ``[P, V]``, contiguous, changed in place.
        processors: P of them.
        ban: False leaves bad words and min_tokens out.
    """
    num_rows, vocab_size = logits.shape
    assert num_rows == len(processors)
    flat = logits.view(-1)
    repeated, counted, biased, banned = (_Edits(flat, vocab_size) for _ in range(4))
    allowed: list[tuple[int, Ids]] = []
    for row, processor in enumerate(processors):
        rules = processor.rules
        if rules.repetition != 1:
            seen = processor.history().seen
            repeated.add(row, seen, np.full(len(seen), rules.repetition, np.float32))
        if rules.presence or rules.frequency:
            history = processor.history()
            penalties = rules.presence + rules.frequency * history.counts
            counted.add(row, history.ids, penalties.astype(np.float32))
        if len(rules.bias_ids):
            biased.add(row, rules.bias_ids, rules.biases)
        if rules.allowed is not None:
            allowed.append((row, rules.allowed))
        if ban and (ids := _ids(processor.banned())).size:
            banned.add(row, ids, np.full(len(ids), -np.inf, np.float32))
    if repeated:
        index, penalty = repeated.tensors()
        old = flat[index]
        flat[index] = old.where(old <= 0, old / penalty).where(old > 0, old * penalty)
    if counted:
        index, penalty = counted.tensors()
        flat[index] -= penalty
    if biased:
        index, bias = biased.tensors()
        flat[index] += bias
    for row, ids in allowed:
        index, _ = _Edits(logits[row], vocab_size).add(0, ids, np.empty(0, np.float32)).tensors()
        kept = logits[row][index]
        logits[row].fill_(-np.inf)[index] = kept
    if banned:
        index, value = banned.tensors()
        flat[index] = value
    for row, processor in enumerate(processors):
        if processor.grammar is not None:
            processor.grammar.mask(logits[row])


class _Edits:
    """Flat indices into a batch's logits, and a value for each."""

    def __init__(self, flat: torch.Tensor, vocab_size: int) -> None:
        self._device = flat.device
        self._vocab_size = vocab_size
        self._index: list[Ids] = []
        self._values: list[npt.NDArray[np.float32]] = []

    def __bool__(self) -> bool:
        return bool(self._index)

    def add(self, row: int, ids: Ids, values: npt.NDArray[np.float32]) -> _Edits:
        self._index.append(row * self._vocab_size + ids)
        self._values.append(values)
        return self

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        index = torch.from_numpy(np.concatenate(self._index)).to(self._device)
        values = torch.from_numpy(np.concatenate(self._values)).to(self._device)
        return index, values


def _ids(ids: Iterable[int]) -> Ids:
    return np.fromiter(ids, np.int64)


def _bad_words(
    words: Sequence[str], tokenizer: ContinuationEncoder | None
) -> tuple[set[int], tuple[tuple[int, ...], ...]]:
    """Single ids, and longer sequences, of the words with and without a space before them."""
    if words and tokenizer is None:
        raise InvalidRequestError(
            "bad_words needs a tokenizer, and this model has none.", field="bad_words"
        )
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip(" ")
        # A word of spaces only is meant as it is.
        for text in (bare, " " + bare) if bare else (word,):
            assert tokenizer is not None
            ids = tuple(tokenizer.encode_continuation(text))
            if not ids:
                raise InvalidRequestError(
                    f"bad_words holds {word!r}, which has no tokens.", field="bad_words"
                )
            sequences[ids] = None
    single = {ids[0] for ids in sequences if len(ids) == 1}
    return single, tuple(ids for ids in sequences if len(ids) > 1)
