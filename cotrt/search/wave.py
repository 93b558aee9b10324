"""Branches grow at once: generates in slices, within a budget, as if each were one generate."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio

from cotrt.errors import KVCacheExhaustedError, NumericsError, PromptTooLongError
from cotrt.options.sampling import SamplingParams
from cotrt.program.branches import Branches
from cotrt.search.node_text import ends_inside_stop, find_stop

if TYPE_CHECKING:
    from cotrt.outputs import CompletionOutput
    from cotrt.program.handle import Generation
    from cotrt.search.session import Session
    from cotrt.search.tree import Node

# Seconds between two looks at a budget whose last tokens another search has reserved.
_POLL_S = 0.005


@dataclass(eq=False)
class Growth:
    """One generate on one node, made of one or more generates on its branch.

    Draws are keyed by seed and position, penalties look at the whole branch, and a stop string
    across two slices is found here, so that slices change nothing.

    Attributes:
        node: what grows.
        params: of the whole generate; ``stop`` holds the search's delimiter too.
        limit: tokens that it may sample in all; None without a limit.
        delimiter: the stop string that ends a step and not an answer, or None.
        sampled: tokens sampled so far.
        done: it has ended.
        finish_reason, stop_reason: how; "abort" where the budget or a cancelled scope cut it.
        error: the error that ended it, or None.
        first: length of the branch when it began.
    """

    node: Node
    params: SamplingParams
    limit: int | None
    delimiter: str | None = None
    sampled: int = 0
    done: bool = False
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: NumericsError | None = None
    first: int = field(default=0, init=False)
    _is_inside_stop: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.first = len(self.node.branch)
        if self.limit == 0:
            self.end("length")

    def end(self, finish_reason: str | None, stop_reason: int | str | None = None) -> None:
        self.done = True
        self.finish_reason, self.stop_reason = finish_reason, stop_reason

    @property
    def stop(self) -> str | None:
        """The stop string of the params that ended it, or None."""
        reason = self.stop_reason if self.finish_reason == "stop" else None
        return reason if isinstance(reason, str) and reason != self.delimiter else None

    def want(self, target: int | None) -> int | None:
        """Tokens that the next slice may sample, up to `target` in all."""
        if self._is_inside_stop:
            return 1  # one by one, until it is clear whether the stop string goes on
        ends = [end for end in (self.limit, target) if end is not None]
        return max(0, min(ends) - self.sampled) if ends else None

    def slice_params(self, max_tokens: int | None) -> SamplingParams:
        min_tokens = max(0, self.params.min_tokens - self.sampled)
        if max_tokens is not None:
            min_tokens = min(min_tokens, max_tokens)
        return self.params.replace(max_tokens=max_tokens, min_tokens=min_tokens)

    def update(self, output: CompletionOutput, max_tokens: int | None) -> None:
        """A slice has ended."""
        if output.finish_reason == "stop":
            self.end("stop", output.stop_reason)
        elif output.finish_reason == "abort":
            self.end("abort")
        elif stop := self._stop_across_slices(len(output.token_ids)):
            self.end("stop", stop)
        elif (
            max_tokens is None  # the context or the pool ended it
            or len(output.token_ids) < max_tokens
            or self.sampled == self.limit
        ):
            self.end("length", output.stop_reason)

    def _stop_across_slices(self, fresh: int) -> str | None:
        """A stop string that began before the last `fresh` tokens and ended in them."""
        stops = self.params.stop
        if not stops:
            return None
        # A token of text has a byte at least, so that this many hold the longest stop.
        reach = max(len(stop.encode("utf-8", "replace")) for stop in stops) + 4 + fresh
        branch = self.node.branch
        end = len(branch)
        text = branch.decode(max(self.first, end - reach), end)
        was_inside, self._is_inside_stop = self._is_inside_stop, ends_inside_stop(text, stops)
        if not was_inside or self.sampled <= self.params.min_tokens:
            return None
        before = branch.decode(max(self.first, end - reach), end - fresh)
        return find_stop(text, max(1, len(text) - len(before)), stops)


async def advance(session: Session, growths: Sequence[Growth], every: int | None = None) -> None:
    """Grow all to their ends, or each by `every` tokens, in as few batches as can be.

    Without a budget that binds this is one batch. With one, its tokens are shared evenly; what
    some leave, the others get in a next batch; when none is left, those that are not done end with
    "abort".
    """
    budget = session.budget
    targets = {growth: None if every is None else growth.sampled + every for growth in growths}

    def is_open(growth: Growth) -> bool:
        want = None if growth.done else growth.want(targets[growth])
        return not growth.done and want != 0

    while running := [growth for growth in growths if is_open(growth)]:
        wants = [growth.want(targets[growth]) for growth in running]
        shares = budget.reserve_tokens(wants)
        if not any(share is None or share > 0 for share in shares):
            if budget.is_reserved_by_others:
                await anyio.sleep(_POLL_S)
                continue
            for growth in running:
                growth.end("abort")
            session.stop("max_tokens")
            return
        batch = [(g, n) for g, n in zip(running, shares) if n is None or n > 0]
        before = sum(len(growth.node.branch) for growth, _ in batch)
        try:
            await _one_batch(batch)
        finally:
            sampled = sum(len(growth.node.branch) for growth, _ in batch) - before
            budget.settle(shares, sampled)


async def _one_batch(batch: Sequence[tuple[Growth, int | None]]) -> None:
    lengths = [len(growth.node.branch) for growth, _ in batch]
    generations = _start(batch)
    try:
        for generation in generations.values():
            with contextlib.suppress(NumericsError):  # that one's own end; the others go on
                await generation
    except BaseException:
        for generation in generations.values():
            generation.cancel()
        raise
    finally:
        for (growth, max_tokens), length in zip(batch, lengths):
            growth.sampled += len(growth.node.branch) - length
            _settle(growth, generations.get(growth), max_tokens)


def _settle(growth: Growth, generation: Generation | None, max_tokens: int | None) -> None:
    if generation is None:
        growth.end("length")  # no room for one token more
    elif not generation.done:
        growth.end("abort")
    else:
        try:
            growth.update(generation.result(), max_tokens)
        except NumericsError as error:
            growth.error = error
            growth.end("abort")
        except Exception:  # what awaiting it raised, and raises on
            growth.end("abort")


def _start(batch: Sequence[tuple[Growth, int | None]]) -> dict[Growth, Generation]:
    """One generate on each, started together; those without room for a token are left out."""
    params = [growth.slice_params(max_tokens) for growth, max_tokens in batch]
    try:
        together = Branches(growth.node.branch for growth, _ in batch).generate(params)
        return {growth: generation for (growth, _), generation in zip(batch, together)}
    except (PromptTooLongError, KVCacheExhaustedError):
        found = {}
        for (growth, _), one in zip(batch, params):
            with contextlib.suppress(PromptTooLongError, KVCacheExhaustedError):
                found[growth] = growth.node.branch.generate(one)
        if not found and all(growth.node.depth <= 1 for growth, _ in batch):
            raise  # the prompt itself is too long
        return found
