"""What the program API shares: the engine, its thread, the tokenizer, checks of requests."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from cotrt.engine.driver import Driver
from cotrt.engine.engine import Engine
from cotrt.engine.state import GenerationState, ScoreState, TokenScores, TokenSequence
from cotrt.errors import (
    BranchBusyError,
    BranchPrunedError,
    InvalidRequestError,
    KVCacheExhaustedError,
    PromptTooLongError,
)
from cotrt.options.numbers import plain_ints
from cotrt.options.sampling import SamplingParams, StructuredOutputs
from cotrt.outputs import CompletionOutput
from cotrt.program.saved_key import read_saved_key
from cotrt.sampling.seeds import normalize_seed

if TYPE_CHECKING:
    from cotrt.engine.text import StreamText
    from cotrt.program.branch import Branch
    from cotrt.sampling.grammar import Grammar, GrammarCompiler, GrammarState
    from cotrt.sampling.logprobs import Logprob


@contextmanager
def half_pairs_refused() -> Iterator[None]:
    """Refuse text that has no UTF-8 form; tokenizers say no more than that it is no str."""
    try:
        yield
    except (TypeError, UnicodeEncodeError) as error:
        if isinstance(error, UnicodeEncodeError) or "TextInputSequence" in str(error):
            raise InvalidRequestError(
                "the text holds half of a surrogate pair, which no tokenizer can encode: clean it "
                "with text.encode('utf-8', 'replace').decode()"
            ) from error
        raise


class Runtime:
    """One engine as its program sees it; `LLM`, branches, handles and chats hold it.

    Attributes:
        engine: the engine; its ``lock`` guards the tree.
        driver: the engine's thread.
        tokenizer: the tokenizer, or None.
        eos_ids: token ids that end a sequence.
        defaults: sampling defaults of the model.
        max_model_len: tokens that a sequence may have.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        tokenizer: Any,
        eos_ids: frozenset[int],
        defaults: Mapping[str, Any],
        max_model_len: int,
        saved_key: bytes | str | os.PathLike[str] | None = None,
    ) -> None:
        self.engine = engine
        self.driver = Driver(engine)
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        self.defaults = SamplingParams(**defaults)
        self.max_model_len = max_model_len
        self.vocab_size = engine.model.vocab_size
        self._grammars: GrammarCompiler | None = None
        self._saved_key = saved_key

    def saved_key(self) -> bytes | None:
        """The key that signs saved branches; None where there can be none.

        Raises:
            InvalidRequestError: the file that was named for it cannot be read any more.
        """
        return read_saved_key(self._saved_key)

    def check(self) -> None:
        """Raise EngineDeadError if nothing can run any more."""
        self.driver.check()

    def check_process(self) -> None:
        """Raise EngineDeadError in a forked child."""
        self.driver.check_process()

    def on_leaving(self, release: Callable[[], None]) -> None:
        """`release` at the end of a ``with`` block; in a forked child there is nothing to do."""
        if not self.driver.forked:
            release()

    def check_owner(self, branch: Branch) -> None:
        """Raise InvalidRequestError for another LLM's branch."""
        if branch._runtime is not self:
            raise InvalidRequestError(f"branch {branch.id} belongs to another LLM")

    # ---- checks -------------------------------------------------------------------------------

    def params(
        self, params: SamplingParams | None, overrides: Mapping[str, Any] = {}
    ) -> SamplingParams:
        """`params`, or the model's defaults, with `overrides` on top."""
        if params is None:
            params = self.defaults
        elif not isinstance(params, SamplingParams):
            raise InvalidRequestError(
                f"params must be a SamplingParams or None, not {type(params).__name__}"
            )
        params = params.replace(**overrides) if overrides else params
        self._check_ids_of(params)
        if params.structured_outputs is not None:
            self._grammar(params.structured_outputs)  # which compiles it, outside of the lock
        return params

    def _grammar(self, wanted: StructuredOutputs) -> Grammar:
        """The compiled grammar of a request; InvalidRequestError for one that is not valid."""
        if self._grammars is None:
            from cotrt.sampling.grammar import GrammarCompiler

            self._grammars = GrammarCompiler(self.tokenizer, self.vocab_size, self.eos_ids)
        return self._grammars.compile(wanted)

    def _begin_grammar(
        self, seq: TokenSequence, wanted: StructuredOutputs, history: list[int], limit: int
    ) -> GrammarState:
        """Begin a grammar, or go on with the one that the branch's last generate was cut in."""
        from cotrt.sampling.grammar import GrammarState

        grammar = self._grammar(wanted)
        if seq.grammar is not None and seq.grammar[0] == wanted:
            begun = seq.ids(seq.grammar[1])
            if begun and GrammarState.can_resume(grammar, begun):
                return GrammarState(grammar, history, begun, limit)
        seq.grammar = (wanted, seq.length)
        return GrammarState(grammar, history, limit=limit)

    def _check_ids_of(self, params: SamplingParams) -> None:
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            for token in getattr(params, name) or ():
                if token >= self.vocab_size:
                    raise InvalidRequestError(
                        f"{name} holds {token}; the vocabulary ends at {self.vocab_size - 1}",
                        field=name,
                    )
        if (params.stop or params.bad_words) and self.tokenizer is None:
            raise InvalidRequestError(
                "stop strings and bad_words need a tokenizer: give tokenizer=",
                field="stop" if params.stop else "bad_words",
            )

    def check_ids(self, ids: Any) -> list[int]:
        """Token ids as a list of ints within the vocabulary."""
        found: list[int] = plain_ints(ids)
        for token in found:
            if type(token) is not int or not 0 <= token < self.vocab_size:
                raise InvalidRequestError(
                    f"token id {token!r} is not an int from 0 to {self.vocab_size - 1}"
                )
        return found

    def encode_prompt(self, prompt: Any) -> tuple[str | None, list[int]]:
        """A prompt's text (None where it is given as ids) and its ids, special tokens added."""
        if isinstance(prompt, str):
            if not prompt and self.tokenizer is not None:
                bos = self.tokenizer.bos_token_id
                return prompt, [] if bos is None else [bos]
            with half_pairs_refused():
                ids: list[int] = self._need_tokenizer().encode(prompt)
            return prompt, ids
        if isinstance(prompt, Mapping):
            if set(prompt) != {"prompt_token_ids"}:
                raise InvalidRequestError(
                    f'a prompt dict must be {{"prompt_token_ids": [...]}}, not keys {list(prompt)}'
                )
            prompt = prompt["prompt_token_ids"]
        if isinstance(prompt, bytes) or not hasattr(prompt, "__iter__"):
            raise InvalidRequestError(
                f"a prompt must be a str, token ids or a dict, not {type(prompt).__name__}"
            )
        return None, self.check_ids(prompt)

    def encode_chat(self, messages: Any, **options: Any) -> list[int]:
        """A conversation as ids; contents are plain text."""
        return self.render_chat(messages, **options)[1]

    def render_chat(self, messages: Any, **options: Any) -> tuple[str, list[int]]:
        """A conversation as its template writes it, and its ids."""
        tokenizer = self._need_tokenizer()
        with half_pairs_refused():
            chat = tokenizer.prepare_chat(messages, **options)
            ids: list[int] = tokenizer.encode_prepared(chat)
        return chat.text, ids

    def chat_encoder(self) -> Any:
        """The tokenizer, for chats.

        Raises:
            InvalidRequestError: the model has none.
        """
        return self._need_tokenizer()

    def encode_continuation(self, value: Any, *, special: bool = True, what: str) -> list[int]:
        """Text that follows other text, or token ids, as ids."""
        if isinstance(value, str):
            with half_pairs_refused():
                ids: list[int] = self._need_tokenizer().encode_continuation(value, special=special)
            return ids
        if isinstance(value, (bytes, Mapping)) or not hasattr(value, "__iter__"):
            raise InvalidRequestError(
                f"{what} must be a str or a list of token ids, not {type(value).__name__}"
            )
        return self.check_ids(value)

    def _need_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise InvalidRequestError("this model has no tokenizer: give token ids, or tokenizer=")
        return self.tokenizer

    def check_length(self, length: int) -> None:
        """A sequence of `length` tokens is within the context and the pool."""
        if length > self.max_model_len:
            raise PromptTooLongError(
                f"{length} tokens are more than max_model_len={self.max_model_len}: shorten the "
                "text, or load the model with a larger max_model_len"
            )
        pool = self.engine.tree.pool
        if -(-length // pool.block_size) > pool.num_blocks:
            raise KVCacheExhaustedError(
                f"{length} tokens need {-(-length // pool.block_size)} KV blocks of "
                f"{pool.block_size}, the whole pool has {pool.num_blocks}: shorten the text, or "
                "raise kv_cache_memory_bytes"
            )

    def max_length(self, params: SamplingParams, length: int, default: int | None) -> int:
        """Absolute length at which a generate from `length` tokens ends.

        Raises:
            InvalidRequestError: there is no token to go on from.
            PromptTooLongError, KVCacheExhaustedError: it does not fit.
        """
        limit = params.max_tokens if params.is_max_tokens_set else default
        if length == 0:
            bos = None if self.tokenizer is None else self.tokenizer.bos_token_id
            why = (
                "an empty prompt stays empty where there is no BOS token"
                if bos is None
                else f'a list of no token ids stays empty (only the text "" becomes BOS, {bos})'
            )
            raise InvalidRequestError(
                f"there is no token to generate from: {why}; give a prompt, or extend the branch "
                "first"
            )
        self.check_length(length)
        if limit == 0:
            return length
        if length >= self.max_model_len:
            raise PromptTooLongError(
                f"{length} tokens leave no room for one more within max_model_len="
                f"{self.max_model_len}: shorten the prompt, or set max_tokens=0"
            )
        return self.max_model_len if limit is None else min(length + limit, self.max_model_len)

    def check_usable(self, seq: TokenSequence, *, idle: bool = True) -> None:
        """The branch is not pruned or closed and, if `idle`, not running. Under the lock."""
        if seq.pruned:
            raise BranchPrunedError(
                f"branch {seq.id} was pruned: fork a living one, or make a root"
            )
        if idle and seq.is_busy:
            raise BranchBusyError(
                f"branch {seq.id} is generating: wait with g.result() or stop it with g.cancel()"
            )

    # ---- work ---------------------------------------------------------------------------------

    def new_state(
        self,
        seq: TokenSequence,
        params: SamplingParams,
        *,
        default_max_tokens: int | None,
        seed: int | None = None,
    ) -> GenerationState:
        """A generate on `seq`, not started. Under the lock.

        Args:
            seed: an explicit seed; None takes ``params.seed``, and without one the branch's own.
        """
        from cotrt.sampling.detokenizer import NUM_CONTEXT_IDS
        from cotrt.sampling.output_text import OutputText
        from cotrt.sampling.processors import LogitsProcessor

        start = seq.length
        max_length = self.max_length(params, start, default_max_tokens)
        if params.structured_outputs is not None and (params.stop or params.stop_token_ids):
            # They would cut the output inside its grammar, which says itself where it ends.
            params = params.replace(stop=(), stop_token_ids=())
        if seed is None and params.seed is not None:
            seed = normalize_seed(params.seed)
        eos_ids = frozenset() if params.ignore_eos else self.eos_ids
        processor = LogitsProcessor.build(
            params,
            vocab_size=self.vocab_size,
            eos_token_ids=self.eos_ids,
            tokenizer=self.tokenizer,
        )
        context = seq.ids(max(0, start - NUM_CONTEXT_IDS), start)
        history: list[int] | None = None
        if processor is not None:
            ids, sampled = seq.ids(), seq.span.slice_sampled(0, start)
            history = [token for token, was in zip(ids, sampled) if was]
            given = [token for token, was in zip(ids, sampled) if not was]
            wanted = params.structured_outputs
            grammar = None
            if wanted is not None:
                grammar = self._begin_grammar(seq, wanted, history, max_length - start)
            processor = processor.bind(given, history, grammar)
        if params.structured_outputs is None:
            seq.grammar = None
        state = GenerationState(
            params=params,
            seq=seq,
            start=start,
            max_length=max_length,
            # A grammar that is complete leaves nothing but the end, however few tokens there are.
            min_length=start + (params.min_tokens if params.structured_outputs is None else 0),
            eos_ids=eos_ids,
            stop_ids=eos_ids | frozenset(params.stop_token_ids),
            seed=seq.seed if seed is None else seed,
            epoch=seq.epoch if seed is None else 0,
            processor=processor,
            history=history,
            watch=OutputText(self.tokenizer, params, context) if params.stop else None,
            context=context,
        )
        return state

    def cancel(self, states: Sequence[GenerationState | ScoreState]) -> None:
        """Cancel works that are not done."""
        with self.engine.lock:
            for state in states:
                self.engine.cancel(state)

    # ---- results ------------------------------------------------------------------------------

    def completion(self, state: GenerationState, index: int) -> CompletionOutput:
        """The result of an ended generate."""
        logprobs = None
        if state.params.logprobs is not None:
            logprobs = [
                self.logprob_dict(token, scores)
                for token, scores in zip(state.tokens, state.scores)
            ]
        return CompletionOutput(
            index=index,
            text=self.stream_text(state).append(state.tokens, True),
            token_ids=list(state.tokens),
            cumulative_logprob=sum(state.logprobs),
            logprobs=logprobs,
            finish_reason=state.finish_reason,
            stop_reason=state.stop_reason,
        )

    def stream_text(
        self, state: GenerationState, tags: Collection[str] = (), *, hides_end: bool = False
    ) -> StreamText:
        """A reader of a generation's text from its first token on.

        Args:
            tags: special tokens that are shown even where the params leave special tokens out.
            hides_end: never show the token that ended it.
        """
        from cotrt.engine.text import StreamText

        tokenizer = self.tokenizer
        if tags and tokenizer is not None:
            tokenizer = tokenizer.showing(tags)
        return StreamText(tokenizer, state, hides_end=hides_end)

    def logprob_dict(self, token: int, scores: TokenScores) -> dict[int, Logprob]:
        """vLLM's shape: the given or sampled token, and the likeliest ones."""
        from cotrt.sampling.logprobs import logprob_dict

        return logprob_dict(token, scores.logprob, scores.top, self.tokenizer)

    def decode(
        self, ids: Sequence[int], before: Sequence[int] = (), *, skip_special_tokens: bool = False
    ) -> str:
        """Text of ids as it follows `before`, whose last NUM_CONTEXT_IDS are enough."""
        from cotrt.sampling.detokenizer import text_after

        tokenizer = self._need_tokenizer()
        return text_after(tokenizer, ids, before, skip_special_tokens=skip_special_tokens)
