"""Results as data and text: JSON out and in, events, logs, trees in a terminal."""

from __future__ import annotations

import json
import time
from fractions import Fraction

import pydantic
import pytest
from search_helpers import PARAMS, PROMPT, run, small_llm, text_model, treasure

from cotrt import search
from cotrt.search import JsonLog, SearchResult, SearchTree
from cotrt.search.render import one_line


def some_tree() -> SearchTree:
    tree = SearchTree(algorithm="test", nodes=[search.Node(id=0, kind="root", text="Question?")])
    first = tree.add(tree.root, "step")
    first.text, first.token_ids, first.logprobs = "one\ntwo", [1, 2], [-0.5, None]
    second = tree.add(tree.root, "step")
    second.state, second.note, second.value = "pruned", "worse", -1.25
    third = tree.add(first, "probe")
    third.state, third.answer = "finished", "42"
    tree.best_id = third.id
    return tree


def test_a_tree_in_a_terminal_marks_the_winners_path() -> None:
    lines = str(some_tree()).splitlines()
    assert lines[0].startswith("test: 3 nodes, 1 tokens sampled")
    assert lines[1:] == [
        '*· 0 0t "Question?"',
        '├─*· 1 2t "one⏎two"',
        '│ *o 3 probe 0t [42] ""',
        '└─ x 2 -1.250 0t "" (worse)',
    ]


def test_a_line_is_safe_and_fits() -> None:
    assert one_line("a\x1b[31mred\u202e\r\nb\tc") == "a�[31mred�⏎b c"
    tree = some_tree()
    tree.nodes[1].text = "日本語" * 60
    wide = next(line for line in tree.render(width=40).splitlines() if "日本" in line)
    assert wide.endswith("…") and len(wide) < 30
    assert "... and 2 more nodes" in tree.render(max_nodes=2)
    assert "no nodes" in str(SearchTree())


def test_a_long_chain_is_not_a_staircase() -> None:
    tree = SearchTree(nodes=[search.Node(id=0, kind="root")])
    node = tree.root
    for _ in range(5000):
        node = tree.add(node, "step")
    lines = str(tree).splitlines()
    assert len(lines) == 5002 and max(map(len, lines[1:])) < 60


def test_json_out_and_in() -> None:
    with small_llm() as llm:
        result = run(
            search.self_consistency,
            llm,
            PROMPT,
            n=5,
            extract=lambda text: Fraction(len(text), 7),
            early_stop=None,
            params=PARAMS,
        )
        data = json.loads(result.model_dump_json())
        assert data["answer"] == str(result.answer)
        again = SearchResult.model_validate(data)
        assert again.best.text == result.best.text and again.votes.rows[0].votes >= 1
        assert data["tree"]["nodes"][1]["logprob"] == result.tree.nodes[1].logprob
        assert len(repr(result)) < 400


@pytest.mark.parametrize(
    "nodes",
    [
        [{"id": 1}],
        [{"id": 0}, {"id": 1, "parent": 1}],
        [{"id": 0}, {"id": 1, "parent": 7}],
        [{"id": 0}, {"id": 1}],
    ],
)
def test_a_broken_tree_is_refused(nodes) -> None:
    with pytest.raises(pydantic.ValidationError):
        SearchTree.model_validate({"nodes": nodes})
    with pytest.raises(pydantic.ValidationError):
        SearchResult.model_validate(
            {"algorithm": "x", "tree": {"nodes": [{"id": 0}]}, "best_id": 3}
        )


def test_a_log_grows_while_the_search_runs(tmp_path) -> None:
    path = tmp_path / "log.jsonl"
    seen_early = []

    def score(node) -> float:
        seen_early.append(len(path.read_text().splitlines()))
        return treasure(node)

    with small_llm() as llm, JsonLog(path) as log:
        result = run(
            search.step_beam_search,
            llm,
            PROMPT,
            width=2,
            branching=2,
            score=score,
            params=PARAMS,
            on_event=log,
        )
    events = [json.loads(line) for line in path.read_text().splitlines()]
    assert seen_early[0] >= 5  # the start and the first wave's nodes
    assert events[0]["kind"] == "start" and events[0]["prompt"] == PROMPT
    assert events[-1]["kind"] == "end" and events[-1]["best_id"] == result.best_id
    nodes = {e["node_id"]: e for e in events if e["kind"] == "node"}
    assert {i: e["node"]["token_ids"] for i, e in nodes.items()} == {
        node.id: node.token_ids for node in result.tree.nodes[1:]
    }
    scores = {e["node_id"]: e["score"] for e in events if e["kind"] == "score"}
    states = {e["node_id"]: e["state"] for e in events if e["kind"] == "state"}
    for node in result.tree.nodes[1:]:
        assert scores.get(node.id) == node.score
        assert states.get(node.id, "kept") == node.state
    times = [event["time_s"] for event in events]
    assert times == sorted(times)


def test_async_listeners_hear_everything_in_order() -> None:
    heard: list[str] = []

    async def on_event(event: search.SearchEvent) -> None:
        heard.append(event.kind)

    with small_llm() as llm:
        run(search.best_of_n, llm, PROMPT, n=3, params=PARAMS, on_event=on_event)
    assert heard[0] == "start" and heard[-1] == "end" and heard.count("node") == 3


def test_a_raising_listener_is_an_error_without_a_leak() -> None:
    def on_event(event: search.SearchEvent) -> None:
        if event.kind == "score":
            raise KeyError("listener")

    with small_llm() as llm:
        with pytest.raises(KeyError, match="listener"):
            run(search.best_of_n, llm, PROMPT, n=3, params=PARAMS, on_event=on_event)
        assert llm.memory().in_use == 0


def test_run_refuses_a_running_loop() -> None:
    from cotrt import InvalidRequestError

    async def main() -> None:
        search.run(search.best_of_n, None)

    with pytest.raises(InvalidRequestError, match="use await best_of_n"):
        run(main)


def test_a_failing_branch_is_pruned_and_the_others_go_on() -> None:
    from cotrt.testing import ScriptedModel

    def next_probs(ids: list[int]) -> dict[int, float]:
        text = "".join(map(chr, ids)).rpartition("?")[2]
        if text.startswith("b"):
            return {}  # no token is possible: infinite logits
        return {97: 0.5, 98: 0.5} if not text else {0: 1.0}

    with small_llm(ScriptedModel(next_probs, vocab_size=128, eos_token_id=0)) as llm:
        result = run(search.best_of_n, llm, PROMPT, n=12, params=PARAMS)
        failed = [node for node in result.tree.nodes if node.state == "pruned"]
        assert failed and all("NumericsError" in node.note for node in failed)
        assert result.answer == "a" and llm.memory().in_use == 0


def test_time_is_measured() -> None:
    with small_llm(text_model({"x": 1.0})) as llm:
        begun = time.monotonic()
        result = run(search.best_of_n, llm, PROMPT, n=1, params=PARAMS)
        assert 0 < result.usage.wall_time_s <= time.monotonic() - begun
