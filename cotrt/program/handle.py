"""Handles of running work: wait in a thread, await under asyncio or trio, iterate, cancel."""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

import anyio.lowlevel

from cotrt.engine.promise import Promise, in_running_loop, sleep_at_exit
from cotrt.engine.state import GenerationState
from cotrt.errors import BranchPrunedError, InvalidRequestError, NumericsError
from cotrt.options.numbers import plain_float
from cotrt.outputs import Chunk, CompletionOutput

if TYPE_CHECKING:
    from cotrt.program.runtime import Runtime

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
        runtime: Runtime | None,
        promises: Sequence[Promise],
        collect: Callable[[], T],
        cancel: Callable[[], None],
    ) -> None:
        self._runtime = runtime
        self._promises = promises
        self._collect = collect
        self._cancel = cancel

    @property
    def done(self) -> bool:
        """Whether the work has ended, in whatever way."""
        return all(promise.done for promise in self._promises)

    def cancel(self) -> None:
        """Stop the work now; a handle that is done stays as it is.

        Raises:
            EngineDeadError: the process was forked.
        """
        self._check_process()
        self._cancel()

    def result(self, timeout: float | None = None) -> T:
        """Wait for the work to end, and return what it brought.

        A Ctrl-C while it waits raises KeyboardInterrupt; the work runs on.

        Args:
            timeout: seconds; None waits without limit.

        Raises:
            TimeoutError: `timeout` went by; the work runs on.
            InvalidRequestError: `timeout` is no number.
            CotrtError: the work ended with this error.
            concurrent.futures.CancelledError: it was cancelled and has no partial result.
            EngineDeadError: the engine stopped before it was done, or the process was forked.
        """
        self._check_process()
        timeout = _seconds(timeout)
        if not self.done:
            warn_inside_loop()
            if not _wait_all(self._promises, timeout):
                raise TimeoutError(f"not done after {timeout} s; the work runs on")
        return self._collect()

    def __await__(self) -> Generator[Any, None, T]:
        return self._wait().__await__()

    def _check_process(self) -> None:
        if self._runtime is not None:  # None: a handle of no work at all
            self._runtime.check_process()

    async def _wait(self) -> T:
        self._check_process()
        if not self._promises:
            await anyio.lowlevel.checkpoint()
        for promise in self._promises:
            await self._wait_or_cancel(promise, lambda p=promise: p.done)  # type: ignore[misc]
        return self._collect()

    async def _wait_or_cancel(
        self, promise: Promise, ready: Callable[[], bool], progress: bool = False
    ) -> None:
        """Wait; where the task or scope is cancelled meanwhile, cancel the work too."""
        try:
            await promise.wait_async(ready, progress)
        except (Exception, GeneratorExit):
            # GeneratorExit: the coroutine was dropped, maybe by the garbage collector in the
            # middle of anything. That is no cancellation, and no time to touch the engine.
            raise
        except BaseException:
            self._cancel()
            raise

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {'done' if self.done else 'running'}>"

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
        # Neither of the two callables holds the handle, which is gone when it is dropped.
        super().__init__(
            runtime,
            (state.promise,),
            _Completion(runtime, state, index).take,
            lambda: runtime.cancel([state]),
        )
        self._runtime: Runtime = runtime
        self._state = state

    def _completion(self) -> CompletionOutput:
        return self._collect()

    def __repr__(self) -> str:
        state = self._state
        if not state.promise.done:
            return f"<Generation: running, {state.seq.length - state.start} tokens so far>"
        error = state.promise.error
        how = state.finish_reason if error is None else f"ended by {type(error).__name__}"
        return f"<Generation: {how}, {len(state.tokens)} tokens>"

    def __iter__(self) -> Iterator[Chunk]:
        self._check_process()
        return _Chunks(self)

    def __aiter__(self) -> AsyncIterator[Chunk]:
        self._check_process()
        return _Chunks(self)

    def __enter__(self) -> Generation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._runtime.on_leaving(self._cancel)


class _Completion:
    """What a generate brought, made once and when it is first wanted."""

    def __init__(self, runtime: Runtime, state: GenerationState, index: int) -> None:
        self._runtime = runtime
        self._state = state
        self._index = index
        self._output: CompletionOutput | None = None

    def take(self) -> CompletionOutput:
        """The completion; raises what the work ended with."""
        if self._output is None:
            self._output = self._runtime.completion(self._state, self._index)
        error = self._state.promise.error
        if error is None:
            return self._output
        error = fresh(error)
        if isinstance(error, (BranchPrunedError, NumericsError)) and error.output is None:
            error.output = self._output
        try:
            raise error
        finally:
            del error  # its traceback holds this frame


class _Chunks(Iterator[Chunk], AsyncIterator[Chunk]):
    """One reader of a generation, from its first chunk on, for ``for`` and for ``async for``.

    No (async) generator, for those do things when they are dropped: in a loop that may be closed,
    in a thread that may hold anything.
    """

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._state = generation._state
        self._text = generation._runtime.stream_text(self._state)
        self._seen = 0
        self._is_over = False

    def __next__(self) -> Chunk:
        while not self._is_over:
            if not self._is_ready():
                self._generation._runtime.check_process()
                warn_inside_loop()
                self._state.promise.wait(self._is_ready, progress=True)
            chunk = self._take()
            if chunk is not None:
                return chunk
        self._generation._completion()  # raises what the work ended with
        raise StopIteration

    async def __anext__(self) -> Chunk:
        while not self._is_over:
            await self._generation._wait_or_cancel(
                self._state.promise, self._is_ready, progress=True
            )
            chunk = self._take()
            if chunk is not None:
                return chunk
        self._generation._completion()
        raise StopAsyncIteration

    def _is_ready(self) -> bool:
        state = self._state
        return state.promise.done or state.seq.length - state.start > self._seen

    def _take(self) -> Chunk | None:
        """What has come since the last chunk; None where there is nothing to show for it."""
        state, runtime = self._state, self._generation._runtime
        runtime.check_process()
        with runtime.engine.lock:
            self._is_over = state.promise.done
            if self._is_over:
                tokens, logprobs = state.tokens[self._seen :], state.logprobs[self._seen :]
            else:
                seq, start = state.seq, state.start + self._seen
                tokens = seq.ids(start)
                given = seq.span.slice_logprobs(start, seq.length)
                logprobs = [value for value in given if value is not None]
        self._seen += len(tokens)
        text = self._text.append(tokens, self._is_over)
        return Chunk(text, tokens, logprobs) if tokens or text else None


class Generations(Handle[list[CompletionOutput]], Sequence[Generation]):
    """Several generates that run together: a sequence of `Generation`, and a handle of all.

    Its result is the list of completions in order; if one failed, its error is raised after the
    rest have ended, with ``.outputs`` holding the others' completions and None for those that
    failed.
    """

    def __init__(self, runtime: Runtime | None, items: Sequence[Generation]) -> None:
        self._items = held = list(items)  # the callables hold the items, and not the handle
        super().__init__(
            runtime,
            [g._state.promise for g in held],
            lambda: gather(held, Generation._completion),
            lambda: None if runtime is None else runtime.cancel([g._state for g in held]),
        )

    @overload
    def __getitem__(self, index: int) -> Generation: ...
    @overload
    def __getitem__(self, index: slice) -> list[Generation]: ...
    def __getitem__(self, index: int | slice) -> Generation | list[Generation]:
        """The generation at `index`, or a list of them for a slice."""
        return self._items[index]

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return several(self)

    def __enter__(self) -> Generations:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._runtime is not None:
            self._runtime.on_leaving(self._cancel)


def several(generations: Sequence[Generation]) -> str:
    """The repr of a handle of several."""
    done = sum(each.done for each in generations)
    return f"<{type(generations).__name__}: {len(generations)} outputs, {done} done>"


def joined(
    runtime: Runtime | None, handles: Sequence[Handle[Any]], collect: Callable[[], T]
) -> Handle[T]:
    """One handle of the work of several."""

    def cancel() -> None:
        for handle in handles:
            handle._cancel()

    promises = [promise for handle in handles for promise in handle._promises]
    return Handle(runtime, promises, collect, cancel)


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
        try:
            raise first
        finally:
            del first  # its traceback holds this frame
    return results  # type: ignore[return-value]


def fresh(error: BaseException) -> BaseException:
    """A copy of a promise's error: many may raise it, at once and in several threads."""
    sleep_at_exit(error)
    try:
        copied = copy.copy(error)
    except Exception:  # an error of the user's own that cannot be copied
        return error
    copied.__cause__ = error.__cause__
    return copied.with_traceback(error.__traceback__)


def _seconds(timeout: Any) -> float | None:
    """A timeout as `_wait_all` takes it; infinity is no limit."""
    if timeout is None:
        return None
    seconds = plain_float(timeout)
    if seconds is None or math.isnan(seconds):
        raise InvalidRequestError(f"timeout={timeout!r:.80}: must be a number of seconds, or None")
    return None if seconds == math.inf else float(seconds)


def _wait_all(promises: Sequence[Promise], timeout: float | None) -> bool:
    deadline = None if timeout is None else time.monotonic() + timeout
    for promise in promises:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not promise.wait(lambda p=promise: p.done, left):  # type: ignore[misc]
            return False
    return True


def warn_inside_loop() -> None:
    """Log one warning a process where a call blocks a running event loop's thread."""
    global _warned_of_loop
    if not _warned_of_loop and in_running_loop():
        _warned_of_loop = True
        logger.warning(
            "a blocking call inside a running event loop stops the whole loop until it returns: "
            "use `await handle` or `async for` there"
        )
