"""Budgets: never exceeded, used up exactly where work remains, nested, shared, in time."""

from __future__ import annotations

import anyio
import pytest
from search_helpers import ALGORITHMS, PARAMS, PROMPT, counting_model, run, small_llm

from cotrt import InvalidRequestError, SamplingParams, search
from cotrt.search import Budget
from cotrt.search.budget import _share

ENDLESS = SamplingParams(max_tokens=20)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_tokens_are_never_exceeded_and_used_up(name: str) -> None:
    fn, options = ALGORITHMS[name]
    with small_llm() as llm:
        for limit in (0, 1, 7, 40, 95):
            before = llm.metrics["generated_tokens"]
            budget = Budget(max_tokens=limit)
            result = run(fn, llm, PROMPT, params=PARAMS, budget=budget, **options)
            spent = llm.metrics["generated_tokens"] - before
            assert spent == budget.spent_tokens == result.usage.tokens_generated <= limit
            assert budget._reserved == 0
            if result.stopped_by == "max_tokens":
                assert spent == limit
                assert limit == 0 or result.best is not None
            else:
                assert spent <= limit
            cut = [node for node in result.tree.nodes if node.state == "cut"]
            assert bool(cut) == (result.stopped_by == "max_tokens")
            assert llm.memory().in_use == 0


@pytest.mark.parametrize("name", ALGORITHMS)
def test_branches_are_never_exceeded_and_used_up(name: str) -> None:
    fn, options = ALGORITHMS[name]
    with small_llm() as llm:
        for limit in (0, 1, 5):
            budget = Budget(max_branches=limit)
            result = run(fn, llm, PROMPT, params=PARAMS, budget=budget, **options)
            assert budget.spent_branches == result.usage.branches <= limit
            if result.stopped_by == "max_branches":
                assert budget.spent_branches == limit
            assert limit == 0 or result.best is not None
            assert llm.memory().in_use == 0


def test_what_finished_before_the_end_is_scored_and_wins() -> None:
    from search_helpers import text_model

    with small_llm(text_model({"ok": 1.0, "never ending " * 30: 1.0})) as llm:
        result = run(
            search.best_of_n,
            llm,
            PROMPT,
            n=6,
            score=lambda node: len(node.path_text),
            budget=Budget(max_tokens=60),
            params=SamplingParams(max_tokens=300),
        )
        assert result.stopped_by == "max_tokens"
        assert result.answer == "ok" and result.best.score == 2.0
        assert result.usage.tokens_generated == 60


def test_shares_are_even_and_leave_nothing() -> None:
    inf = float("inf")
    assert _share(10, [2, inf, inf]) == [2, 4, 4]
    assert _share(5, [inf, inf]) == [3, 2]
    assert _share(2, [inf] * 3) == [1, 1, 0]
    assert _share(100, [1, 2]) == [1, 2]
    assert _share(0, [inf]) == [0]


def test_a_part_ends_at_its_own_limit_and_at_that_around_it() -> None:
    total = Budget(max_tokens=50)
    with small_llm(counting_model()) as llm:
        first = run(
            search.best_of_n, llm, PROMPT, n=4, params=ENDLESS, budget=total.part(max_tokens=30)
        )
        assert first.usage.tokens_generated == 30 and total.tokens_left == 20
        part = total.part(max_tokens=45)
        second = run(search.best_of_n, llm, PROMPT, n=4, params=ENDLESS, budget=part)
        assert second.usage.tokens_generated == 20 == part.spent_tokens
        assert total.tokens_left == 0 and part.tokens_left == 0
        third = run(search.best_of_n, llm, PROMPT, n=4, params=ENDLESS, budget=total)
        assert third.best is None and third.answer is None and third.stopped_by == "max_tokens"


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_searches_at_once_share_one_budget(backend: str) -> None:
    budget = Budget(max_tokens=97)

    async def both(llm):
        results = []

        async def one(n: int) -> None:
            results.append(await search.best_of_n(llm, PROMPT, n=n, params=ENDLESS, budget=budget))

        async with anyio.create_task_group() as group:
            for n in (2, 3, 4):
                group.start_soon(one, n)
        return results

    with small_llm(counting_model()) as llm:
        results = run(both, llm, backend=backend)
        # 9 branches want 20 tokens each: work remains, so all 97 are spent.
        assert sum(r.usage.tokens_generated for r in results) == 97 == budget.spent_tokens
        assert llm.metrics["generated_tokens"] == 97
        assert not any(r.usage.exact for r in results) or len(results) == 1
        assert llm.memory().in_use == 0


def test_a_nested_search_in_a_scorer_spends_from_the_same_budget() -> None:
    budget = Budget(max_tokens=60)

    async def by_rollout(node: search.Node) -> float:
        inner = await search.best_of_n(
            node.branch, n=2, params=SamplingParams(max_tokens=4), budget=budget
        )
        return inner.best.score if inner.best else -100.0

    with small_llm(counting_model()) as llm:
        result = run(
            search.step_beam_search,
            llm,
            PROMPT,
            width=2,
            branching=2,
            score=by_rollout,
            params=SamplingParams(max_tokens=5),
            budget=budget,
        )
        assert llm.metrics["generated_tokens"] == 60 == budget.spent_tokens
        assert result.stopped_by == "max_tokens" and result.best is not None
        assert llm.memory().in_use == 0


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_deadline_ends_generation_and_scorers(backend: str) -> None:
    async def forever(node: search.Node) -> float:
        await anyio.sleep(60)
        return 1.0

    with small_llm(counting_model()) as llm:
        result = run(
            search.best_of_n,
            llm,
            PROMPT,
            n=3,
            params=SamplingParams(max_tokens=100_000),
            budget=Budget(deadline_s=0.2),
            backend=backend,
        )
        assert result.stopped_by == "deadline"
        assert result.best is not None and not result.best.finished and result.text
        assert {node.state for node in result.tree.nodes[1:]} == {"cut"}
        assert llm.memory().in_use == 0
        result = run(
            search.best_of_n,
            llm,
            PROMPT,
            n=3,
            params=ENDLESS,
            score=forever,
            budget=Budget(deadline_s=0.4),
            backend=backend,
        )
        assert result.stopped_by == "deadline" and len(result.text) == 20
        assert llm.memory().in_use == 0 and llm.metrics["running"] == 0


def test_wrong_limits_are_refused() -> None:
    for wrong in ({"max_tokens": -1}, {"max_tokens": 1.5}, {"max_branches": True}):
        with pytest.raises(InvalidRequestError):
            Budget(**wrong)
    with pytest.raises(InvalidRequestError):
        Budget(deadline_s=float("nan"))
    assert repr(Budget(max_tokens=3)) == "Budget(max_tokens=3; spent 0 tokens, 0 branches)"
