"""Every algorithm on a model with a known best answer: winner, counts, states, laws."""

from __future__ import annotations

import math

import pytest
from search_helpers import (
    ALGORITHMS,
    PARAMS,
    PATHS,
    PROMPT,
    check_laws,
    path_reward,
    run,
    small_llm,
    text_model,
    treasure,
)

from cotrt import InvalidRequestError, SamplingParams, search

FINDS_TREASURE = [
    name
    for name in ALGORITHMS
    if name not in ("self_consistency", "self_refine", "probe_early_exit")
]


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_laws_hold(name: str, backend: str) -> None:
    fn, options = ALGORITHMS[name]
    with small_llm() as llm:
        root = llm.branch(PROMPT)
        before_ids, before, in_use = root.token_ids, llm.metrics, llm.memory().in_use
        result = run(fn, root, params=PARAMS, backend=backend, **options)
        in_use += -(-len(root) // 8)  # the root's own blocks are computed now
        check_laws(result, llm, root, before=before, in_use=in_use)
        assert root.token_ids == before_ids
        assert result.tree.best_id == result.best_id
        assert "*" in str(result.tree) and str(result.tree).count("\n") >= 2


@pytest.mark.parametrize("name", FINDS_TREASURE)
def test_the_known_best_answer_wins(name: str) -> None:
    fn, options = ALGORITHMS[name]
    with small_llm() as llm:
        result = run(fn, llm, PROMPT, params=PARAMS, extract="number", **options)
        assert result.best is not None and result.best.finished
        assert result.answer == "9"
        assert result.best.text == "go up\n\ngo right\n\ntreasure 9"
        assert llm.memory().in_use == 0


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_llm_root_leaves_nothing_behind(name: str) -> None:
    fn, options = ALGORITHMS[name]
    with small_llm() as llm:
        result = run(fn, llm, PROMPT, params=PARAMS, **options)
        assert result.tree.root.text == PROMPT
        assert llm.memory().in_use == 0


def test_best_of_n_counts_every_token() -> None:
    with small_llm() as llm:
        result = run(search.best_of_n, llm, PROMPT, n=7, score=path_reward, params=PARAMS)
        texts = [candidate.text for candidate in result.candidates]
        assert len(texts) == 7 and set(texts) <= set(PATHS)
        assert result.usage.tokens_generated == sum(len(text) + 1 for text in texts)
        assert result.usage.prompt_tokens_computed == len(PROMPT)
        assert result.usage.branches == 7
        assert result.stopped_by == "completed"
        scores = [candidate.score for candidate in result.candidates]
        assert scores == sorted(scores, reverse=True)


def test_best_of_n_stops_at_an_accepted_answer() -> None:
    model = text_model({"good": 1.0, "bad and very long indeed " * 40: 1.0})
    with small_llm(model) as llm:
        result = run(
            search.best_of_n,
            llm,
            PROMPT,
            n=8,
            score=lambda node: float(node.path_text == "good"),
            accept=1.0,
            every=8,
            params=SamplingParams(max_tokens=2000),
        )
        assert result.stopped_by == "accepted" and result.answer == "good"
        pruned = [node for node in result.tree.nodes if node.state == "pruned"]
        assert pruned and all(node.num_sampled <= 8 for node in pruned)


def test_an_unfinished_answer_never_beats_a_finished_one() -> None:
    model = text_model({"ok": 1.0, "wonderful and long": 1.0})
    with small_llm(model) as llm:
        result = run(
            search.best_of_n,
            llm,
            PROMPT,
            n=8,
            score=lambda node: float(len(node.path_text)),
            params=SamplingParams(max_tokens=6),
        )
        assert result.best.text == "ok" and result.best.finished
        cut = [candidate for candidate in result.candidates if not candidate.finished]
        assert cut and all(c.finish_reason == "length" and c.score == 6.0 for c in cut)


def test_beam_search_keeps_width_and_sets_finished_beams_aside() -> None:
    with small_llm() as llm:
        result = run(
            search.step_beam_search,
            llm,
            PROMPT,
            width=2,
            branching=3,
            score=treasure,
            params=PARAMS,
        )
        nodes = result.tree.nodes
        assert sum(node.parent == 0 for node in nodes) == 6
        grown = {node.parent for node in nodes if node.parent}
        for depth in (1, 2):
            assert len([i for i in grown if nodes[i].depth == depth]) <= 2
        finished = [node for node in nodes if node.is_finished]
        assert finished and all(node.finish_reason == "stop" for node in finished)
        assert all(node.id not in grown for node in finished)
        for node in nodes[1:]:
            if node.state == "kept" and node.id in grown:
                assert node.text.endswith("\n\n") and node.stop_reason == "\n\n"


def test_equal_steps_are_merged() -> None:
    with small_llm(text_model({"one\n\ntwo": 1.0})) as llm:
        result = run(search.step_beam_search, llm, PROMPT, width=2, branching=3, params=PARAMS)
        first = [node for node in result.tree.nodes if node.parent == 0]
        assert [node.state for node in first] == ["kept"] + ["pruned"] * 5
        assert first[0].visits == 6
        assert result.best.text == "one\n\ntwo"


@pytest.mark.parametrize(
    ("how", "value"), [("last", 0.5), ("min", 0.25), ("prod", 0.125), ("mean", 0.375)]
)
def test_aggregates(how: str, value: float) -> None:
    with small_llm(text_model({"a\n\nb": 1.0})) as llm:
        result = run(
            search.step_beam_search,
            llm,
            PROMPT,
            width=1,
            branching=1,
            aggregate=how,
            score=lambda node: 0.25 if node.depth == 1 else 0.5,
            params=PARAMS,
        )
        assert result.best.score == value


def test_subtrees_of_dvts_do_not_compete() -> None:
    with small_llm() as llm:
        result = run(
            search.diverse_verifier_tree_search,
            llm,
            PROMPT,
            n=8,
            width=2,
            score=treasure,
            params=PARAMS,
        )
        first = [node for node in result.tree.nodes if node.parent == 0]
        assert len(first) == 8
        for i in range(4):
            pair = first[2 * i : 2 * i + 2]
            assert sum(node.state != "pruned" for node in pair) == 1
            lost = next(node for node in pair if node.state == "pruned")
            assert lost.value <= max(node.value for node in pair)
        assert len(result.candidates) == 4


def test_rebase_shares_sum_to_what_is_left() -> None:
    from cotrt.search.rebase import share_by_softmax

    assert share_by_softmax([1.0, 1.0], 5, 0.2) == [3, 2]
    assert share_by_softmax([1.0, 0.0], 4, 0.01) == [4, 0]
    shares = share_by_softmax([0.1, 0.5, 0.3], 16, 0.2)
    assert sum(shares) == 16 and shares[1] > shares[2] > shares[0]
    with small_llm() as llm:
        result = run(search.rebase, llm, PROMPT, n=9, score=treasure, params=PARAMS)
        assert sum(node.parent == 0 for node in result.tree.nodes) == 9
        finished = sum(node.is_finished and node.depth == 1 for node in result.tree.nodes)
        assert sum(node.depth == 2 for node in result.tree.nodes) == 9 - finished


def test_thoughts_can_be_proposed() -> None:
    def propose(node: search.Node) -> list[str]:
        return ["left", "right", "left"] if node.depth < 2 else ["end"]

    with small_llm() as llm:
        result = run(
            search.tree_of_thoughts,
            llm,
            PROMPT,
            propose=propose,
            score=lambda node: node.path_text.count("right"),
            breadth=2,
            branching=3,
            depth=3,
            params=PARAMS,
        )
        assert result.best.text == "right\nright\nend\n" and result.best.finished
        assert result.usage.tokens_generated == 0
        forced = sum(len(node.token_ids) for node in result.tree.nodes[1:])
        # Proposals are only forced; nothing needs their KV, so nothing was computed.
        assert result.usage.prompt_tokens_computed == 0 < forced


def test_the_model_itself_can_propose() -> None:
    model = text_model({"left\nright\n": 1.0}, mark=":")
    with small_llm(model) as llm:
        result = run(
            search.tree_of_thoughts,
            llm,
            PROMPT,
            propose="\nMoves:",
            score=lambda node: node.path_text.count("right"),
            breadth=1,
            branching=2,
            depth=2,
            params=PARAMS,
        )
        assert result.best.text == "right\nright\n"
        asked = [node for node in result.tree.nodes if node.kind == "proposal"]
        assert len(asked) == 2 and all(node.state == "pruned" for node in asked)
        assert result.usage.tokens_generated == sum(node.num_sampled for node in asked)


def test_states_can_be_voted_on_and_drawn() -> None:
    def vote(nodes: list[search.Node]) -> list[float]:
        return [float("up" in node.path_text) + float("right" in node.path_text) for node in nodes]

    with small_llm() as llm:
        result = run(
            search.tree_of_thoughts,
            llm,
            PROMPT,
            score=vote,
            method_evaluate="vote",
            method_select="sample",
            n_evaluate_sample=2,
            delimiter="\n\n",
            breadth=3,
            branching=6,
            params=PARAMS.replace(seed=4),
        )
        assert result.best.text.startswith("go up\n\ngo right") and result.best.score == 2.0


def test_depth_first_prunes_backtracks_and_accepts() -> None:
    with small_llm() as llm:
        result = run(
            search.tree_of_thoughts,
            llm,
            PROMPT,
            score=treasure,
            method="dfs",
            prune_below=0.15,
            accept=1.0,
            delimiter="\n\n",
            breadth=3,
            branching=8,
            params=PARAMS,
        )
        assert result.stopped_by == "accepted" and "treasure" in result.answer
        for node in result.tree.nodes:
            if node.state == "pruned" and node.note.startswith("below"):
                assert node.value < 0.15
                assert not result.tree.children(node.id)


def test_mcts_visits_add_up_and_rollouts_run_together() -> None:
    with small_llm() as llm:
        steps = llm.metrics["steps"]
        result = run(
            search.mcts,
            llm,
            PROMPT,
            score=path_reward,
            rollouts=12,
            parallel=6,
            branching=3,
            depth=3,
            params=PARAMS,
        )
        steps = llm.metrics["steps"] - steps
        root = result.tree.root
        assert root.visits == 12
        children = [node for node in result.tree.children(0) if node.kind == "step"]
        assert sum(node.visits for node in children) == 12
        assert all(0 <= node.value <= 1 for node in children)
        # Two waves, each a step and a rollout of at most 64 tokens, whatever the width.
        longest = max(len(text) for text in PATHS) + 1
        assert steps <= 2 * (longest + 6) + 4 < result.usage.tokens_generated


@pytest.mark.parametrize("choose_by", ["visits", "value", "vote"])
def test_mcts_chooses(choose_by: str) -> None:
    with small_llm() as llm:
        result = run(
            search.mcts,
            llm,
            PROMPT,
            score=path_reward,
            choose_by=choose_by,
            extract="number",
            rollouts=24,
            parallel=4,
            params=PARAMS,
        )
        assert result.answer == "9"


def test_mcts_runs_when_the_whole_tree_is_terminal() -> None:
    with small_llm(text_model({"yes": 1.0})) as llm:
        result = run(search.mcts, llm, PROMPT, rollouts=9, parallel=4, branching=2, params=PARAMS)
        assert result.tree.root.visits == 9
        assert result.usage.tokens_generated == 2 * len("yes.")
        assert result.best.finished


def test_the_default_score_is_the_mean_logprob() -> None:
    with small_llm() as llm:
        result = run(search.best_of_n, llm, PROMPT, n=6, params=PARAMS)
        for candidate in result.candidates:
            assert math.isclose(candidate.score, candidate.mean_logprob)


@pytest.mark.parametrize(
    ("fn", "options", "message"),
    [
        (search.best_of_n, {"n": 0}, "n=0"),
        (search.best_of_n, {"score": 3}, "score=3"),
        (search.best_of_n, {"budget": 5}, "budget"),
        (search.best_of_n, {"params": SamplingParams(n=2)}, "n=2"),
        (search.self_consistency, {"early_stop": "soon"}, "early_stop"),
        (search.self_consistency, {"threshold": 1.0}, "threshold"),
        (search.self_consistency, {"extract": "nothing"}, "extract"),
        (search.step_beam_search, {"aggregate": "max"}, "aggregate"),
        (search.step_beam_search, {"delimiter": ""}, "delimiter"),
        (search.diverse_verifier_tree_search, {"n": 6, "width": 4}, "multiple"),
        (search.rebase, {"temperature": 0}, "temperature"),
        (search.tree_of_thoughts, {"method": "astar"}, "method"),
        (search.tree_of_thoughts, {"method_evaluate": "vote"}, "vote"),
        (search.mcts, {"choose_by": "vote"}, "extract"),
        (search.mcts, {"parallel": 0}, "parallel"),
        (search.self_refine, {"criticise": None}, "criticise"),
        (search.probe_early_exit, {"every": True}, "every"),
        (search.run_agent, {}, "tools"),
        (search.run_agent, {"tools": [1]}, "must be a function"),
    ],
)
def test_wrong_arguments_are_refused(fn, options, message) -> None:
    with small_llm() as llm:
        with pytest.raises(InvalidRequestError, match=message):
            run(fn, llm, PROMPT, **options)
        assert llm.metrics["forks"] == 0


def test_root_and_prompt_must_fit() -> None:
    with small_llm() as llm:
        with pytest.raises(InvalidRequestError, match="needs a prompt"):
            run(search.best_of_n, llm)
        with pytest.raises(InvalidRequestError, match="takes no prompt"):
            run(search.best_of_n, llm.branch(PROMPT), "more")
        with pytest.raises(InvalidRequestError, match="must be a Branch or an LLM"):
            run(search.best_of_n, "text")
