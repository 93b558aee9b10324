"""Handles of running work: wait in a thread, await under asyncio or trio, iterate, cancel."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from cotrt.engine.promise import Promise, in_running_loop
from cotrt.engine.state import GenerationState
from cotrt.errors import BranchPrunedError, NumericsError
from cotrt.outputs import Chunk, CompletionOutput

if TYPE_CHECKING:
    from cotrt.runtime import Runtime

logger = logging.getLogger(__name__)

T = TypeVar("T")
_warned_of_loop = False


class Handle(Generic[T]):
    """Work that started when the handle was made.

    ``h.result()`` blocks, ``await h`` waits under asyncio and trio. A dropped handle does not stop
    the work. Cancelling the task or scope that awaits a handle cancels it.
    """

    def __init__(
        self,
        promises: Sequence[Promise],
        collect: Callable[[], T],
        cancel: Callable[[], None],
        check: Callable[[], None],
    ) -> None:
        self._promises = promises
        self._collect = collect
        self._cancel = cancel
        self._check = check

    @property
    def done(self) -> bool:
        """Whether the work has ended, in whatever way."""
        return all(promise.done for promise in self._promises)

    def cancel(self) -> None:
        """Stop the work now; a handle that is done stays as it is.

        Raises:
            EngineDeadError: the process was forked.
        """
        self._check()
        self._cancel()

    def result(self, timeout: float | None = None) -> T:
        """Wait for the work to end, and return what it brought.

        Args:
            timeout: seconds; None waits without limit.

        Raises:
            TimeoutError: `timeout` went by; the work runs on.
            CotrtError: the work ended with this error.
            concurrent.futures.CancelledError: it was cancelled and has no partial result.
            EngineDeadError: the engine stopped.
        """
        self._check()
        if not self.done:
            _warn_inside_loop()
            if not _wait_all(self._promises, timeout):
                raise TimeoutError(f"not done after {timeout} s; the work runs on")
        return self._collect()

    def __await__(self) -> Generator[Any, None, T]:
        return self._wait().__await__()

    async def _wait(self) -> T:
        self._check()
        try:
            for promise in self._promises:
                await promise.wait_async(lambda p=promise: p.done)  # type: ignore[misc]
        except BaseException:  # the task or scope was cancelled; Ctrl-C comes here too
            self._cancel()
            raise
        return self._collect()

    def __reduce__(self) -> Any:
        raise TypeError(
            f"a {type(self).__name__} cannot be pickled: it belongs to this process's engine; "
            "send its result"
        )


class Generation(Handle[CompletionOutput]):
    """One running generate: a handle of its completion that can be iterated.

    ``for chunk in g`` and ``async for chunk in g`` give pieces as they come; every iterator starts
    at the first, and ``break`` does not stop the work. ``with b.generate(...) as g:`` cancels on
    leaving. After ``g.cancel()`` the branch keeps its tokens and ``g.result()`` gives them with
    finish_reason "abort"; after a prune ``g.result()`` raises `BranchPrunedError`, which carries
    them in ``.output``.
    """

    def __init__(self, runtime: Runtime, state: GenerationState, index: int = 0) -> None:
        super().__init__(
            (state.promise,), self._completion, lambda: runtime.cancel([state]), runtime.check
        )
        self._runtime = runtime
        self._state = state
        self._index = index

    def _completion(self) -> CompletionOutput:
        error = self._state.promise.error
        if error is None:
            return self._output()
        if isinstance(error, (BranchPrunedError, NumericsError)) and error.output is None:
            error.output = self._output()
        raise error

    def _output(self) -> CompletionOutput:
        return self._runtime.completion(self._state, self._index)

    def _take(self, seen: int) -> tuple[list[int], list[float], bool]:
        """Tokens and log-probabilities after the first `seen`, and whether these are the last."""
        state = self._state
        with self._runtime.engine.lock:
            if state.promise.done:
                return state.tokens[seen:], state.logprobs[seen:], True
            seq = state.seq
            logprobs = seq.span.slice_logprobs(state.start + seen, seq.length)
            tokens = seq.ids(state.start + seen)
        return tokens, [lp for lp in logprobs if lp is not None], False

    def _is_ahead_of(self, seen: int) -> Callable[[], bool]:
        state = self._state
        return lambda: state.promise.done or state.seq.length - state.start > seen

    def __iter__(self) -> Iterator[Chunk]:
        self._check()
        seen, text = 0, self._runtime.stream_text(self._state)
        while True:
            ready = self._is_ahead_of(seen)
            if not ready():
                _warn_inside_loop()
                self._state.promise.wait(ready, progress=True)
            tokens, logprobs, last = self._take(seen)
            seen += len(tokens)
            piece = text.append(tokens, last)
            if tokens or piece:
                yield Chunk(piece, tokens, logprobs)
            if last:
                self._completion()  # raises what the work ended with
                return

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        self._check()
        seen, text = 0, self._runtime.stream_text(self._state)
        while True:
            try:
                await self._state.promise.wait_async(self._is_ahead_of(seen), progress=True)
            except BaseException:
                self._cancel()
                raise
            tokens, logprobs, last = self._take(seen)
            seen += len(tokens)
            piece = text.append(tokens, last)
            if tokens or piece:
                yield Chunk(piece, tokens, logprobs)
            if last:
                self._completion()
                return

    def __enter__(self) -> Generation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()


class Generations(Handle[list[CompletionOutput]], Sequence[Generation]):
    """Several generates that run together: a sequence of `Generation`, and a handle of all.

    Its result is the list of completions in order; if one failed, its error is raised after the
    rest have ended, with ``.outputs`` holding the others' completions and None for those that
    failed.
    """

    def __init__(self, runtime: Runtime, items: Sequence[Generation]) -> None:
        self._items = list(items)
        super().__init__(
            [g._state.promise for g in self._items],
            self._completions,
            lambda: runtime.cancel([g._state for g in self._items]),
            runtime.check,
        )

    def _completions(self) -> list[CompletionOutput]:
        return gather(self._items, lambda g: g._completion())

    @overload
    def __getitem__(self, index: int) -> Generation: ...
    @overload
    def __getitem__(self, index: slice) -> list[Generation]: ...
    def __getitem__(self, index: int | slice) -> Generation | list[Generation]:
        """The generation at `index`, or a list of them for a slice."""
        return self._items[index]

    def __len__(self) -> int:
        return len(self._items)

    def __enter__(self) -> Generations:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()


def gather(items: Sequence[Any], collect: Callable[[Any], T]) -> list[T]:
    """Collect all; the first error is raised at the end, with the rest in its ``.outputs``."""
    results: list[T | None] = []
    first: BaseException | None = None
    for item in items:
        try:
            results.append(collect(item))
        except Exception as error:
            results.append(None)
            first = first or error
    if first is not None:
        first.outputs = results  # type: ignore[attr-defined]
        raise first
    return results  # type: ignore[return-value]


def _wait_all(promises: Sequence[Promise], timeout: float | None) -> bool:
    import time

    deadline = None if timeout is None else time.monotonic() + timeout
    for promise in promises:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not promise.wait(lambda p=promise: p.done, left):  # type: ignore[misc]
            return False
    return True


def _warn_inside_loop() -> None:
    global _warned_of_loop
    if not _warned_of_loop and in_running_loop():
        _warned_of_loop = True
        logger.warning(
            "a blocking call inside a running event loop stops the whole loop until it returns: "
            "use `await handle` or `async for` there"
        )
