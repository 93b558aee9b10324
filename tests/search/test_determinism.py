"""The same seed gives the same tree, whatever else runs."""

from __future__ import annotations

import anyio
import pytest
from search_helpers import ALGORITHMS, PARAMS, PROMPT, run, small_llm

from cotrt import SamplingParams

TIMES = {"usage"}
PLACES = {"kv_shared_blocks", "kv_private_blocks"}


def plain(result) -> dict:
    """All that is not a time or a look at the pool."""
    data = result.model_dump(mode="json", exclude=TIMES)
    for node in data["tree"]["nodes"]:
        for name in PLACES:
            del node[name]
    return data | {"tokens": result.usage.tokens_generated}


async def beside_noise(fn, llm, options, params):
    """The search, with other generates of changing number and length around it."""
    stop = False

    async def noise() -> None:
        index = 0
        while not stop:
            index += 1
            branch = llm.branch(f"noise {index}?")
            with branch.fork(1 + index % 5) as forks:
                await forks.generate(SamplingParams(max_tokens=3 + index % 7))
            branch.prune()

    async with anyio.create_task_group() as group:
        group.start_soon(noise)
        await anyio.sleep(0.02)
        result = await fn(llm, PROMPT, params=params, **options)
        stop = True
    return result


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_explicit_seed_gives_the_same_tree_alone_and_beside_others(name: str) -> None:
    fn, options = ALGORITHMS[name]
    params = PARAMS.replace(seed=11)
    with small_llm() as llm:
        alone = run(fn, llm, PROMPT, params=params, **options)
        again = run(fn, llm, PROMPT, params=params, backend="trio", **options)
    with small_llm(max_num_seqs=7, max_num_batched_tokens=64) as llm:
        crowded = run(beside_noise, fn, llm, options, params)
    assert plain(alone) == plain(again) == plain(crowded)
    with small_llm() as llm:
        other = run(fn, llm, PROMPT, params=PARAMS.replace(seed=12), **options)
    assert plain(other)["tree"] != plain(alone)["tree"]


@pytest.mark.parametrize("name", ["best_of_n", "mcts", "self_consistency"])
def test_the_llms_seed_gives_the_same_tree(name: str) -> None:
    fn, options = ALGORITHMS[name]
    if name == "self_consistency":
        options = options | {"early_stop": "posterior", "n": 20}
    results = []
    for _ in range(2):
        with small_llm() as llm:
            results.append(plain(run(fn, llm, PROMPT, params=PARAMS, **options)))
    assert results[0] == results[1]


@pytest.mark.parametrize("name", ["step_beam_search", "tree_of_thoughts", "mcts"])
def test_a_pool_that_is_too_small_changes_nothing(name: str) -> None:
    """Idle branches lose their KV and get it back; the tree is the same."""
    fn, options = ALGORITHMS[name]
    params = PARAMS.replace(seed=11)
    with small_llm() as llm:
        roomy = run(fn, llm, PROMPT, params=params, **options)
    with small_llm(kv_cache_memory_bytes=4 * 8 * 12) as llm:
        tight = run(fn, llm, PROMPT, params=params, **options)
        assert llm.metrics["recomputed_tokens"] > 0 and llm.memory().in_use == 0
    assert plain(tight) == plain(roomy)
