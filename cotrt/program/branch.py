"""Branches: token sequences that a program forks, extends, scores, rolls back and prunes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from cotrt.engine.state import TokenSequence
from cotrt.errors import BranchPrunedError, InvalidRequestError
from cotrt.options.numbers import plain_float, plain_int
from cotrt.options.sampling import SamplingParams
from cotrt.outputs import BranchKV, Choice, Score
from cotrt.program.branches import Branches, Continuation, generate
from cotrt.program.handle import Generation, Handle, joined

if TYPE_CHECKING:
    from cotrt.program.runtime import Runtime

T = TypeVar("T")

# Children of one fork call: they are made under the engine's lock, about 30 microseconds each.
MAX_FORKS = 65_536


class Branch:
    """A token sequence that grows, is rolled back, or is pruned; its KV lives in the engine.

    Make roots with `LLM.branch` and children with `fork`. As a context manager it is pruned on
    leaving, unless it was closed by then. A branch that is garbage-collected counts as closed.

    Attributes:
        metadata: a dict for the program's own use.
    """

    __slots__ = ("_closed", "_kept", "_runtime", "_seq", "__weakref__")

    def __init__(self, runtime: Runtime, seq: TokenSequence) -> None:
        self._runtime = runtime
        self._seq = seq
        self._closed = False
        self._kept: list[Branch] = []  # what was loaded with it, which nobody else holds at first
        runtime.engine.table.watch(self, seq)

    # ---- verbs that need no model -------------------------------------------------------------

    def fork(self, n: int = 1, *, at: int | None = None) -> Branches:
        """`n` children that share every KV block with this branch.

        Nothing is copied and the cost does not depend on the branch's length. Of a running
        branch the children have its tokens as published at the call.

        Args:
            n: how many, 1 to 65,536.
            at: absolute length to fork at; default: all tokens.

        Raises:
            InvalidRequestError: `n` or `at` is out of range.
            BranchPrunedError: the branch was pruned or closed.
            EngineDeadError: the engine has stopped.
        """
        count = plain_int(n)
        if count is None or not 1 <= count <= MAX_FORKS:
            raise InvalidRequestError(
                f"fork(n={n!r}): n must be an int from 1 to {MAX_FORKS}; fork again for more"
            )
        runtime, engine = self._runtime, self._runtime.engine
        runtime.check()
        with engine.lock:
            self._check(idle=False)
            seq = self._seq
            if at is not None:
                at = self._check_length(at, "at")
            return Branches([Branch(runtime, engine.table.fork(seq, at)) for _ in range(count)])

    def extend(self, text_or_ids: Continuation, *, special: bool = True) -> Branch:
        """Append forced tokens: text that follows ``b.text`` exactly, or token ids.

        They are computed with the next step that needs them.

        Args:
            text_or_ids: what to append.
            special: False encodes ``<|im_end|>`` and the like as plain characters: for text that
                comes from tools or users.

        Returns:
            This branch.

        Raises:
            PromptTooLongError: more than max_model_len; nothing is appended.
            KVCacheExhaustedError: more than the whole pool can hold; nothing is appended.
            InvalidRequestError: not text, or a bad token id.
            BranchBusyError: the branch is generating.
            BranchPrunedError: the branch was pruned or closed.
            EngineDeadError: the engine has stopped.
        """
        runtime = self._runtime
        runtime.check()
        ids = runtime.encode_continuation(text_or_ids, special=special, what="extend's argument")
        with runtime.engine.lock:
            self._check()
            runtime.check_length(self._seq.length + len(ids))
            runtime.engine.table.extend(self._seq, ids)
        return self

    def truncate(self, length: int, *, same_draws: bool = False) -> Branch:
        """Roll back to an absolute length noted earlier with ``len(b)``.

        It may lie below the branch's own fork point. Children keep what they share.

        Args:
            length: 0 to ``len(b)``.
            same_draws: False: the next sampling draws anew, and reproducibly; True: it draws
                as it did before.

        Returns:
            This branch.

        Raises:
            InvalidRequestError: `length` is not within 0 to ``len(b)``.
            BranchBusyError: the branch is generating.
            BranchPrunedError: the branch was pruned or closed.
            EngineDeadError: the engine has stopped.
        """
        self._runtime.check()
        with self._runtime.engine.lock:
            self._check()
            length = self._check_length(length, "length")
            self._runtime.engine.table.truncate(self._seq, length, same_draws=same_draws)
        return self

    def prune(self) -> None:
        """Cut this branch and everything grown from it; idempotent.

        Running work stops, and its handles raise `BranchPrunedError`. Blocks that nobody else
        holds leave ``in_use`` at once. A handle that was closed has nothing left to prune.

        Raises:
            EngineDeadError: the process was forked.
        """
        runtime = self._runtime
        runtime.check_process()
        with runtime.engine.lock:
            if not self._closed:
                runtime.engine.table.prune(self._seq)

    def close(self) -> None:
        """Give up this handle; children live on, and running work goes on. Idempotent.

        Raises:
            EngineDeadError: the process was forked.
        """
        runtime = self._runtime
        runtime.check_process()
        with runtime.engine.lock:
            if not self._closed:
                self._closed = True
                runtime.engine.table.close(self._seq)

    def save(self, path: str | os.PathLike[str], *, subtree: bool = False) -> None:
        """Write tokens, log-probabilities, seeds and KV to one safetensors file.

        `LLM.load_branch` makes the branch again from it, without computing. Of a running branch
        the file has its tokens as published at the call. The file appears whole or not at all;
        one that is there is replaced. Running work goes on: KV is read in pieces between steps.

        Args:
            path: the file; its folder must be there.
            subtree: save everything grown from this branch too.

        Raises:
            SavedBranchError: the file cannot be written: no folder, no permission, no space.
            InvalidRequestError: a bad path, or `metadata` that JSON cannot hold as it is.
            BranchPrunedError: the branch was pruned or closed, or is pruned meanwhile.
            EngineDeadError: the engine has stopped.
        """
        from cotrt.program.branch_files import save

        save(self, path, subtree=subtree)

    def keep(self, seconds: float) -> None:
        """A lease: for so long its KV is evicted last. 0 ends it.

        Branches that grow under their leases past half of the pool have the oldest leases honoured,
        as many as fit; the others are as without.

        Raises:
            InvalidRequestError: a negative time, or more than half of the pool would be kept.
            BranchPrunedError: the branch was pruned or closed.
            EngineDeadError: the engine has stopped.
        """
        number = plain_float(seconds)
        if number is None or not number >= 0:
            raise InvalidRequestError(f"keep({seconds!r}): seconds must be a number, 0 or more")
        runtime = self._runtime
        runtime.check()
        with runtime.engine.lock:
            self._check(idle=False)
            runtime.engine.table.keep(self._seq, time.monotonic() + number)

    # ---- verbs that need the model ------------------------------------------------------------

    def generate(self, params: SamplingParams | None = None, **overrides: Any) -> Generation:
        """Sample from here; the branch grows by every sampled token, stop tokens included.

        Args:
            params: how to sample; default: the model's ``generation_config.json``. ``n`` must be
                1, and ``max_tokens`` unset means no limit.
            **overrides: fields of `SamplingParams` to set on top.

        Raises:
            pydantic.ValidationError: a bad value or an unknown field.
            InvalidRequestError: ``n`` is not 1, or the branch is empty.
            PromptTooLongError: no room for one token within max_model_len.
            KVCacheExhaustedError: more than the whole pool can ever hold.
            BranchBusyError: the branch is generating already.
            BranchPrunedError: the branch was pruned or closed.
            EngineDeadError: the engine has stopped.
        """
        params = self._runtime.params(params, overrides)
        return generate([self], [params], [None])[0]

    @overload
    def score(self, continuations: str, *, given: Continuation = ...) -> Handle[Score]: ...
    @overload
    def score(self, continuations: Sequence[Any], *, given: Continuation = ...) -> Handle[Any]: ...
    def score(self, continuations: Any, *, given: Continuation = "") -> Handle[Any]:
        """Log-probability of each continuation after `given`; the branch is unchanged.

        Each is tokenised alone: put the space into the option (" Yes").

        Args:
            continuations: a str or a list of ids is one; a list of those is many, all in one
                batch over the shared prefix.
            given: forced before them and not scored.

        Returns:
            A handle of a `Score`, or of a list of them.

        Raises:
            InvalidRequestError: an empty continuation, or nothing before it.
            PromptTooLongError, KVCacheExhaustedError: it does not fit.
            BranchPrunedError: the branch was pruned or closed.
            EngineDeadError: the engine has stopped.
        """
        from cotrt.program.score import as_options, score

        many, options = as_options(continuations)
        scores = score([self], options, given)[0]
        if many:
            return scores
        return joined(self._runtime, [scores], lambda: scores._collect()[0])

    def choose(
        self,
        options: Sequence[Continuation],
        *,
        given: Continuation = "",
        normalize: Literal["mean", "sum"] = "mean",
    ) -> Handle[Choice]:
        """Score the options, then append `given` and the best one (ties: the first).

        Args:
            options: at least one, different as token ids.
            given: forced before the option.
            normalize: compare mean or total log-probability.

        Raises:
            InvalidRequestError: options that are empty or equal, or a bad `normalize`.
            PromptTooLongError, KVCacheExhaustedError: it does not fit.
            BranchBusyError: the branch is generating.
            BranchPrunedError: the branch was pruned or closed.
            EngineDeadError: the engine has stopped.
        """
        from cotrt.program.choose import choose

        return choose([self], options, given, normalize)[0]

    # ---- properties ---------------------------------------------------------------------------

    @property
    def token_ids(self) -> list[int]:
        """All token ids, given and sampled."""
        return self._read(lambda seq: seq.ids())

    @property
    def logprobs(self) -> list[float | None]:
        """One entry a token: raw log-probability where it was sampled, None where given."""
        return self._read(lambda seq: seq.span.slice_logprobs(0, seq.length))

    @property
    def sampled(self) -> list[bool]:
        """One entry a token: whether it was sampled."""
        return self._read(lambda seq: [bool(x) for x in seq.span.slice_sampled(0, seq.length)])

    @property
    def text(self) -> str:
        """What the model saw, special tokens included.

        Raises:
            InvalidRequestError: the model has no tokenizer.
        """
        return self._runtime.decode(self.token_ids)

    def decode(
        self, start: int = 0, stop: int | None = None, skip_special_tokens: bool = False
    ) -> str:
        """Text of the tokens at absolute positions `start` to `stop` (negative ones from the end).

        It is the text as it follows the tokens before `start`, as a generate from there has it: its
        leading space is kept, and a character that was begun before `start` belongs to it.

        Raises:
            InvalidRequestError: the model has no tokenizer.
        """
        from cotrt.sampling.detokenizer import NUM_CONTEXT_IDS

        def read(seq: TokenSequence) -> tuple[list[int], list[int]]:
            first, last, _ = slice(start, stop).indices(seq.length)
            return seq.ids(first, max(first, last)), seq.ids(max(0, first - NUM_CONTEXT_IDS), first)

        return self._runtime.decode(*self._read(read), skip_special_tokens=skip_special_tokens)

    def __len__(self) -> int:
        return self._read(lambda seq: seq.length)

    def __bool__(self) -> bool:
        return True

    @property
    def parent(self) -> Branch | None:
        """The branch it was forked from, if that lives; else None."""

        def find(seq: TokenSequence) -> Branch | None:
            parent = seq.parent
            if parent is None or not self._runtime.engine.table.is_alive(parent):
                return None
            return self._handle_of(parent)

        return self._read(find)

    @property
    def children(self) -> Branches:
        """Its living children, in the order of their making."""

        def find(seq: TokenSequence) -> Branches:
            alive = self._runtime.engine.table.is_alive
            return Branches([self._handle_of(c) for c in seq.living_children() if alive(c)])

        return self._read(find)

    @property
    def id(self) -> int:
        """Unique in the engine."""
        return self._seq.id

    @property
    def depth(self) -> int:
        """Forks between it and its root."""
        return self._seq.depth

    @property
    def alive(self) -> bool:
        """It was neither pruned nor closed."""
        return not (self._seq.pruned or self._closed)

    @property
    def metadata(self) -> dict[str, Any]:
        """A dict for the program's own use."""
        if self._seq.metadata is None:
            self._seq.metadata = {}
        return self._seq.metadata

    @property
    def finished(self) -> bool:
        """Its last generation ended by an end-of-sequence token, and nothing came after."""
        return self._read(lambda seq: seq.ended_at == seq.length)

    @property
    def kv(self) -> BranchKV:
        """Where its KV is now."""
        from cotrt.program.stats import branch_kv

        return self._read(lambda seq: branch_kv(self._runtime.engine, seq))

    # ---- inside -------------------------------------------------------------------------------

    def _read(self, read: Callable[[TokenSequence], T]) -> T:
        self._runtime.check_process()
        with self._runtime.engine.lock:
            return read(self._seq)

    def _check(self, *, idle: bool = True) -> None:
        if self._closed and not self._seq.pruned:
            raise BranchPrunedError(f"branch {self.id} was closed: keep a handle to use it")
        self._runtime.check_usable(self._seq, idle=idle)

    def _check_length(self, length: Any, name: str) -> int:
        number = plain_int(length)
        if number is None or not 0 <= number <= self._seq.length:
            raise InvalidRequestError(
                f"{name}={length!r}: must be an int from 0 to the branch's length, "
                f"{self._seq.length}"
            )
        return number

    def _handle_of(self, seq: TokenSequence) -> Branch:
        handle: Branch | None = seq.handle() if seq.handle is not None else None
        if handle is not None and not handle._closed:
            return handle
        if seq.closed:
            self._runtime.engine.table.reopen(seq)
        return Branch(self._runtime, seq)

    def __enter__(self) -> Branch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._runtime.on_leaving(self.prune)

    def __repr__(self) -> str:
        state = "pruned" if self._seq.pruned else "closed" if self._closed else "alive"
        return f"<Branch {self.id}: {self._seq.length} tokens, depth {self.depth}, {state}>"

    def __reduce__(self) -> Any:
        raise TypeError(
            "a Branch cannot be pickled: it is a handle into this process's engine; send "
            "b.token_ids, and make a branch of them there"
        )
