"""The same handles under asyncio and trio."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import threading
import types
import warnings

import anyio
import pytest
import trio
from api_helpers import Gate, counting, eventually, is_idle, scripted, slowly

import cotrt.program.handle
from cotrt import BranchPrunedError, SamplingParams

LOOPS = [pytest.param(asyncio.run, id="asyncio"), pytest.param(trio.run, id="trio")]


@pytest.fixture(params=LOOPS)
def loop(request):
    """Runs ``main`` in a fresh loop."""

    def run(main):
        backend = "asyncio" if request.param is asyncio.run else "trio"
        return anyio.run(main, backend=backend)

    return run


def test_await_gives_the_result_and_gives_it_again(loop):
    with scripted() as llm:

        async def main():
            handle = llm.branch("a").generate(max_tokens=20)
            first = await handle
            assert await handle == first == handle.result()
            scores = await llm.branch("a").score(["b", "c"])
            assert len(scores) == 2
            choice = await llm.branch("a").choose(["b", "c"])
            assert choice.option in ("b", "c")
            outputs = await llm.submit(["a", "b"], SamplingParams(max_tokens=3))
            assert len(outputs) == 2
            assert len(await llm.branch("a").fork(3).generate(max_tokens=2)) == 3

        loop(main)


def test_async_for_streams_twice_and_break_does_not_stop_the_work(loop):
    with scripted() as llm:

        async def main():
            generation = llm.branch("a").generate(max_tokens=50)
            async for chunk in generation:
                assert chunk.token_ids
                break
            text = "".join([chunk.text async for chunk in generation])
            assert text == (await generation).text
            assert "".join([chunk.text async for chunk in generation]) == text
            assert len((await generation).token_ids) == 50

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loop(main)
            gc.collect()


def test_every_wait_is_a_checkpoint_even_when_all_is_done(loop):
    with scripted() as llm:
        done = llm.branch("a").generate(max_tokens=3)
        done.result()

        async def main():
            with anyio.CancelScope() as scope:
                scope.cancel()
                await done
            assert scope.cancelled_caught
            with anyio.CancelScope() as scope:
                scope.cancel()
                await llm.submit([])
            assert scope.cancelled_caught

        loop(main)
        assert done.result().finish_reason == "length"


def test_a_cancelled_scope_cancels_the_work_it_waits_for(loop):
    with scripted(slowly()) as llm:

        async def main():
            branch = llm.branch("a")
            generation = branch.generate(max_tokens=100_000)
            with anyio.move_on_after(0.2) as scope:
                await generation
            assert scope.cancelled_caught and generation.done
            assert (await generation).finish_reason == "abort"
            branch.extend("b")

            generation = branch.generate(max_tokens=100_000)
            with anyio.move_on_after(0.2) as scope:
                async for _ in generation:
                    pass
            assert scope.cancelled_caught and generation.result().finish_reason == "abort"

        loop(main)
        assert eventually(lambda: llm.metrics["running"] == 0)


def test_a_scope_that_is_cancelled_between_waits_leaves_dropped_work_alone(loop):
    """A branch owns its work: only who awaits it when cancelled stops it."""
    with scripted(slowly()) as llm:
        branch = llm.branch("a")

        async def main():
            generation = branch.generate(max_tokens=60)
            with anyio.move_on_after(0.02):
                await anyio.sleep(10)
            return generation

        assert len(loop(main).result().token_ids) == 60


def test_one_failing_task_of_a_group_stops_the_others_work(loop):
    with scripted(slowly()) as llm:

        async def wait(handle):
            await handle

        async def main():
            handles = llm.branch("a").fork(4).generate(max_tokens=100_000)
            with pytest.raises(Exception, match="TaskGroup|nursery") as caught:  # noqa: PT012
                async with anyio.create_task_group() as group:
                    for handle in handles:
                        group.start_soon(wait, handle)
                    await anyio.sleep(0.05)
                    raise LookupError("stop")
            assert any(isinstance(e, LookupError) for e in caught.value.exceptions)
            assert all(handle.done for handle in handles)
            assert {h.result().finish_reason for h in handles} == {"abort"}

        loop(main)


def test_many_awaits_of_one_handle_all_wake(loop):
    with scripted() as llm:

        async def main():
            handle = llm.branch("a").generate(max_tokens=30)
            results = []

            async def wait():
                results.append(await handle)

            async with anyio.create_task_group() as group:
                for _ in range(20):
                    group.start_soon(wait)
            assert len(results) == 20 and all(r == results[0] for r in results)

        loop(main)


def test_prune_while_awaited_raises_with_the_output(loop):
    with scripted(slowly()) as llm:

        async def main():
            branch = llm.branch("a")
            generation = branch.generate(max_tokens=100_000)

            async def prune():
                await anyio.sleep(0.05)
                branch.prune()

            async with anyio.create_task_group() as group:
                group.start_soon(prune)
                with pytest.raises(BranchPrunedError) as caught:
                    async for _ in generation:
                        pass
                assert caught.value.output.token_ids

        loop(main)
        assert eventually(lambda: is_idle(llm))


def test_asyncio_gather_wait_for_shield_and_task_cancel():
    with scripted(slowly()) as llm:

        async def main():
            root = llm.branch("a")
            handles = [branch.generate(max_tokens=20) for branch in root.fork(8)]
            outputs = await asyncio.gather(*handles)
            assert [len(o.token_ids) for o in outputs] == [20] * 8

            slow = root.fork()[0].generate(max_tokens=100_000)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(slow, 0.05)
            assert slow.result().finish_reason == "abort"

            kept = root.fork()[0].generate(max_tokens=40)
            task = asyncio.ensure_future(kept)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.shield(task), 0.01)
            assert len((await task).token_ids) == 40

            cancelled = root.fork()[0].generate(max_tokens=100_000)

            async def wait():
                await cancelled

            task = asyncio.create_task(wait())
            await asyncio.sleep(0.02)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert cancelled.done and cancelled.result().finish_reason == "abort"

            group = [b.generate(max_tokens=100_000) for b in root.fork(3)]
            gathered = asyncio.gather(*group)
            await asyncio.sleep(0.02)
            gathered.cancel()
            with pytest.raises(asyncio.CancelledError):
                await gathered
            assert all(g.result().finish_reason == "abort" for g in group)

        asyncio.run(main())


def test_a_loop_that_is_closed_while_work_runs_is_left_alone():
    gate = Gate()
    with scripted(gate) as llm:
        branches = llm.branch("a").fork(3)
        loop = asyncio.new_event_loop()
        generation = branches[0].generate(max_tokens=2000)

        async def read():
            async for _ in generation:
                pass

        tasks = [loop.create_task(read()), loop.create_task(read())]

        async def briefly():
            await asyncio.sleep(0.02)

        loop.run_until_complete(briefly())
        gate.shut()
        loop.close()  # its tasks are still waiting
        gate.open.set()
        assert len(generation.result(60).token_ids) == 2000
        for task in tasks:
            task._log_destroy_pending = False
        del tasks, task
        gc.collect()
        assert len(branches[1].generate(max_tokens=5).result(20).token_ids) == 5


def test_a_blocking_call_while_another_thread_imports_trio(monkeypatch):
    half_imported = types.ModuleType("trio")
    monkeypatch.setitem(sys.modules, "trio", half_imported)
    with scripted() as llm, llm.branch("a") as branch:
        assert branch.generate(max_tokens=2).result().finish_reason == "length"
        half_imported.lowlevel = types.ModuleType("trio.lowlevel")
        assert branch.generate(max_tokens=2).result().finish_reason == "length"
        assert asyncio.run(_awaited(branch.generate(max_tokens=2))).finish_reason == "length"


async def _awaited(handle):
    return await handle


def test_a_coroutine_that_is_dropped_does_not_stop_the_work():
    with scripted(slowly()) as llm:
        generation = llm.branch("a").generate(max_tokens=50)

        async def wait():
            await generation

        coroutine = wait()

        async def main():
            task = asyncio.ensure_future(asyncio.sleep(0))
            await task
            # Step it by hand once, then drop it: GeneratorExit is no cancellation.
            coroutine.send(None)
            coroutine.close()

        asyncio.run(main())
        assert generation.result(20).finish_reason == "length"


def test_two_loops_in_two_threads_and_the_main_thread_at_once():
    with scripted(slowly(seconds=2e-4)) as llm:
        root = llm.branch("a")
        failures = []

        async def main():
            for _ in range(5):
                branches = root.fork(3)
                handles = branches.generate(max_tokens=15)
                texts = []
                async for chunk in handles[0]:
                    texts.append(chunk.text)
                outputs = await handles
                assert outputs[0].text == "".join(texts)
                branches.prune()

        def run(backend):
            try:
                anyio.run(main, backend=backend)
            except BaseException as error:
                failures.append(error)

        threads = [
            threading.Thread(target=run, args=(backend,)) for backend in ("asyncio", "trio") * 2
        ]
        for thread in threads:
            thread.start()
        for _ in range(5):
            with root.fork(2) as branches:
                branches.generate(max_tokens=15).result()
        for thread in threads:
            thread.join(60)
        assert failures == []


def test_a_loop_that_ran_before_and_a_new_one_in_the_same_thread():
    with scripted() as llm:
        for _ in range(3):
            for backend in ("asyncio", "trio"):

                async def main():
                    return await llm.branch("a").generate(max_tokens=3)

                assert len(anyio.run(main, backend=backend).token_ids) == 3


def test_awaiting_outside_of_any_loop_says_so():
    gate = Gate()
    gate.shut()
    with scripted(gate) as llm:
        generation = llm.branch("a").generate(max_tokens=3)
        with pytest.raises(RuntimeError, match="asyncio or trio"):
            generation.__await__().send(None)
        gate.open.set()
        assert generation.result().finish_reason == "length"


def test_blocking_calls_inside_a_loop_log_one_warning(loop, caplog, monkeypatch):
    monkeypatch.setattr(cotrt.program.handle, "_warned_of_loop", False)
    with scripted(slowly()) as llm, caplog.at_level(logging.WARNING, "cotrt"):
        llm.generate("a", SamplingParams(max_tokens=2))
        list(llm.branch("a").generate(max_tokens=3))
        assert not caplog.records

        async def main():
            llm.branch("a").generate(max_tokens=3).result()
            list(llm.branch("a").generate(max_tokens=3))
            llm.generate(["a", "b"], SamplingParams(max_tokens=2))

        loop(main)
        assert len(caplog.records) == 1 and "await" in caplog.text


def test_wake_ups_are_at_most_one_a_step_however_many_wait(monkeypatch):
    from cotrt.engine import promise

    rings = []
    schedule = promise._Bridge.__init__

    def counted(self, call):
        schedule(self, lambda deliver: (rings.append(1), call(deliver)))

    monkeypatch.setattr(promise._Bridge, "__init__", counted)
    with scripted(slowly(counting, 5e-4)) as llm:

        async def read(generation):
            async for _ in generation:
                pass

        async def main():
            generations = llm.branch("a").fork(10).generate(max_tokens=30)
            await asyncio.gather(*[read(g) for g in generations])

        before = llm.metrics["steps"]
        asyncio.run(main())
        assert 0 < len(rings) <= llm.metrics["steps"] - before + 2
