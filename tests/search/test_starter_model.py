"""Searches end to end on the starter model, whose branches end early, late and never."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

import pytest
from isolation import shared_fixture
from search_helpers import add
from starter import assert_apart_by_rounding, starter_llm

from cotrt import LLM, SamplingParams, search
from cotrt.search import SearchResult

pytestmark = pytest.mark.slow

MESSAGES = [{"role": "user", "content": "What is 17 + 25? Explain in short steps."}]
STEP = SamplingParams(temperature=0.9, max_tokens=24)


@shared_fixture()
def llm() -> Iterator[LLM]:
    with starter_llm() as llm:
        yield llm


def check(result: SearchResult, llm: LLM, generated: int) -> None:
    nodes = result.tree.nodes
    assert result.usage.tokens_generated == sum(node.num_sampled for node in nodes) == generated
    eos = {2}
    root = llm.branch(nodes[0].token_ids)
    for candidate in result.candidates:
        node = nodes[candidate.node_id]
        assert node.state != "pruned"
        assert candidate.finished == (candidate.token_ids[-1] in eos) == node.is_finished
        path = result.tree.path(node.id)
        assert candidate.text == "".join(each.text for each in path)
        shown = llm.tokenizer.decode(candidate.token_ids, skip_special_tokens=True)
        assert candidate.text == shown.removesuffix("�")
        [score] = root.score([candidate.token_ids]).result()
        assert_apart_by_rounding(score.logprobs, candidate.logprobs)
        assert math.isclose(candidate.logprob, sum(candidate.logprobs))
    root.prune()
    assert llm.memory().in_use == 0


def test_paths_of_step_searches_are_whole_scored_and_flagged(llm: LLM) -> None:
    """CASES B16: beams of steps and votes with early, late and missing ends."""
    met = Counter[str]()
    for fn, options in (
        (search.step_beam_search, {"width": 4, "branching": 2, "max_steps": 3}),
        (search.diverse_verifier_tree_search, {"n": 8, "width": 2, "max_steps": 3}),
        (search.self_consistency, {"n": 6, "early_stop": None}),
    ):
        before = llm.metrics["generated_tokens"]
        result = search.run(fn, llm, MESSAGES, params=STEP, **options)
        check(result, llm, llm.metrics["generated_tokens"] - before)
        if fn is search.self_consistency:
            for vote in result.votes.votes:
                assert vote.finished == result.tree.nodes[vote.node_id].is_finished
                assert vote.finished or not vote.counted
        else:
            best, others = result.candidates[0], result.candidates[1:]
            assert best.finished or not any(other.finished for other in others)
            assert result.best_id == best.node_id
            # The default score is the mean logprob of the path, as a fresh scoring gives it.
            assert abs(best.score - best.mean_logprob) < 1e-9
        for node in result.tree.nodes[1:]:
            met["pruned"] += node.state == "pruned"
            met["ended"] += node.is_finished
            met["cut"] += node.finish_reason == "length"
            if node.stop_reason == "\n\n":
                met["step"] += 1
                assert "\n\n" in node.text
    assert all(met[kind] for kind in ("pruned", "ended", "cut", "step")), met


@pytest.mark.parametrize(
    ("fn", "options"),
    [
        (search.best_of_n, {"n": 4, "score": search.ask("\nIs this right?")}),
        (search.rebase, {"n": 4, "max_steps": 3}),
        (search.tree_of_thoughts, {"breadth": 2, "branching": 2, "depth": 2}),
        (search.mcts, {"rollouts": 4, "parallel": 2, "branching": 2, "depth": 2}),
        (search.self_refine, {"criticise": lambda node: search.Critique(keep=0), "attempts": 2}),
        (search.probe_early_exit, {"every": 12, "probe_tokens": 6}),
        (search.run_agent, {"tools": [add], "max_turns": 2}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_every_search_runs(llm: LLM, fn, options) -> None:
    before = llm.metrics["generated_tokens"]
    result = search.run(fn, llm, MESSAGES, params=STEP, **options)
    generated = llm.metrics["generated_tokens"] - before
    assert result.usage.tokens_generated == generated > 0
    assert result.best is not None and result.text
    assert SearchResult.model_validate_json(result.model_dump_json()) == result
    assert llm.memory().in_use == 0


def test_a_wave_runs_as_one_batch(llm: LLM) -> None:
    steps = llm.metrics["steps"]
    result = search.run(search.best_of_n, llm, MESSAGES, n=8, params=STEP.replace(ignore_eos=True))
    assert result.usage.tokens_generated == 8 * 24
    assert llm.metrics["steps"] - steps <= 24 + 2
    assert result.usage.prompt_tokens_computed <= len(result.tree.root.token_ids)
