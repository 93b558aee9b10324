"""Cancelled at any point, on both loops: no block is held, and the best so far is the result."""

from __future__ import annotations

import asyncio
import random

import anyio
import pytest
from search_helpers import ALGORITHMS, PARAMS, PROMPT, cancel_at, counting_model, run, small_llm

from cotrt import SamplingParams, search


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_cancelled_scope_gives_the_best_so_far(name: str, backend: str) -> None:
    fn, options = ALGORITHMS[name]

    async def cancelled(llm, root, event_number: int):
        with anyio.CancelScope() as scope:
            result = await fn(
                root, params=PARAMS, on_event=cancel_at(event_number, scope), **options
            )
        if backend == "asyncio":
            task = asyncio.current_task()
            assert not hasattr(task, "cancelling") or task.cancelling() == 0
        await anyio.sleep(0)  # the task itself goes on
        return result

    rng = random.Random(f"{name} {backend}")
    with small_llm() as llm:
        root = llm.branch(PROMPT)
        root.score(" x").result()
        in_use = llm.memory().in_use
        for event_number in (0, rng.randrange(2, 12), rng.randrange(12, 30)):
            result = run(cancelled, llm, root, event_number, backend=backend)
            assert llm.memory().in_use == in_use
            assert llm.metrics["running"] == llm.metrics["waiting"] == 0
            assert all(node._branch is None for node in result.tree.nodes)
            if result.stopped_by == "cancelled":
                assert result.best is None or result.best.token_ids
        assert root.text == PROMPT and len(root.children) == 0


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_cancelled_at_random_moments(backend: str) -> None:
    async def cancelled(llm, seconds: float):
        with anyio.move_on_after(seconds):
            return await search.mcts(
                llm, PROMPT, rollouts=1000, parallel=4, params=SamplingParams(max_tokens=9)
            )

    rng = random.Random(backend)
    with small_llm(counting_model()) as llm:
        for _ in range(6):
            result = run(cancelled, llm, rng.uniform(0, 0.3), backend=backend)
            assert result is None or result.stopped_by == "cancelled"
            assert llm.memory().in_use == 0


def test_a_plain_asyncio_cancel_is_a_cancelled_error() -> None:
    async def main(llm) -> None:
        task = asyncio.create_task(
            search.best_of_n(llm, PROMPT, n=4, params=SamplingParams(max_tokens=100_000))
        )
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert llm.memory().in_use == 0
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(
                search.best_of_n(llm, PROMPT, n=4, params=SamplingParams(max_tokens=100_000)), 0.1
            )
        assert llm.memory().in_use == 0

    with small_llm(counting_model()) as llm:
        asyncio.run(main(llm))


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_an_error_beside_the_search_ends_it(backend: str) -> None:
    async def main(llm) -> None:
        async def fail() -> None:
            await anyio.sleep(0.05)
            raise KeyError("beside")

        async with anyio.create_task_group() as group:
            group.start_soon(fail)
            result = await search.best_of_n(
                llm, PROMPT, n=4, params=SamplingParams(max_tokens=100_000)
            )
            assert result.stopped_by == "cancelled"

    with small_llm(counting_model()) as llm:
        with pytest.raises(BaseException) as caught:
            run(main, llm, backend=backend)
        assert "beside" in repr(caught.value) or "beside" in repr(caught.value.exceptions)
        assert llm.memory().in_use == 0


def test_a_pruned_root_ends_the_search_with_its_error() -> None:
    from cotrt import BranchPrunedError

    async def main(llm, root) -> None:
        async with anyio.create_task_group() as group:

            async def prune() -> None:
                await anyio.sleep(0.05)
                root.prune()

            group.start_soon(prune)
            with pytest.raises(BranchPrunedError):
                await search.best_of_n(root, n=3, params=SamplingParams(max_tokens=100_000))

    with small_llm(counting_model()) as llm:
        run(main, llm, llm.branch(PROMPT))
        assert llm.memory().in_use == 0
