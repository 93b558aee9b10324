"""Models with known answers, and the laws that every search must keep."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import anyio

from cotrt import LLM, Branch, SamplingParams, search
from cotrt.search import SearchResult
from cotrt.testing import ScriptedModel

EOS = 0
PROMPT = "Which way?"
PARAMS = SamplingParams(temperature=1.0, max_tokens=64)

# Paths of steps with a known best one: "up, right" ends at the treasure.
PATHS = {
    "go up\n\ngo right\n\ntreasure 9": 1.0,
    "go up\n\ngo left\n\nstone 2": 2.0,
    "go down\n\ngo right\n\nstone 3": 3.0,
    "go down\n\ngo left\n\nsand 1": 2.0,
    "sit": 1.0,
}
VALUES = {"go up": 0.6, "go down": 0.3, "go right": 0.7, "go left": 0.2, "sit": 0.05}


def probabilities(texts: Mapping[str, float], so_far: str) -> dict[int, float]:
    """Next characters of weighted texts that begin with `so_far`; EOS where one ends."""
    probs: dict[int, float] = {}
    for text, weight in texts.items():
        if text == so_far:
            probs[EOS] = probs.get(EOS, 0.0) + weight
        elif text.startswith(so_far):
            token = ord(text[len(so_far)])
            probs[token] = probs.get(token, 0.0) + weight
    return probs or {EOS: 1.0}


def text_model(texts: Mapping[str, float], *, mark: str = "?") -> ScriptedModel:
    """A model that writes one of the texts after the prompt's last `mark`."""

    def next_probs(ids: list[int]) -> dict[int, float]:
        return probabilities(texts, "".join(map(chr, ids)).rpartition(mark)[2])

    return ScriptedModel(next_probs, vocab_size=128, eos_token_id=EOS)


def counting_model(length: int = 10**6) -> ScriptedModel:
    """Writes lower-case letters, by a rule that depends on all tokens, and never ends."""

    def next_probs(ids: list[int]) -> dict[int, float]:
        base = sum((i + 1) * t for i, t in enumerate(ids)) % 26
        return {97 + (base + k) % 26: 2.0**-k for k in range(6)}

    return ScriptedModel(next_probs, vocab_size=128, eos_token_id=EOS, max_model_len=length)


def treasure(node: Any) -> float:
    """The known value of a step; whole paths to the treasure are worth most."""
    text = node.text.strip()
    if text.startswith("treasure"):
        return 1.0
    return VALUES.get(text, 0.1)


def path_reward(node: Any) -> float:
    """A reward of whole paths."""
    return 1.0 if "treasure" in node.path_text else 0.2 if node.path_text else 0.0


@contextmanager
def small_llm(model: ScriptedModel | None = None, **options: Any) -> Iterator[LLM]:
    """An LLM over a scripted model with a small pool of 8-token blocks."""
    options = {"block_size": 8, "kv_cache_memory_bytes": 4 * 8 * 4096, "seed": 5} | options
    with LLM(model or text_model(PATHS), **options) as llm:
        yield llm


def tool_turns(ids: list[int]) -> dict[int, float]:
    """An agent's model: one call of ``add``, then an answer that repeats the observation."""
    text = "".join(map(chr, ids))
    if "Observation: " in text:
        said = text.rpartition("Observation: ")[2]
        seen, _, written = said.partition("\n")
        return probabilities({f"It is {seen}": 1.0}, written)
    call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
    return probabilities({call: 1.0}, text.rpartition("?")[2])


def agent_model() -> ScriptedModel:
    return ScriptedModel(tool_turns, vocab_size=128, eos_token_id=EOS)


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


# Every algorithm with arguments that suit PATHS; the winner of each is known.
ALGORITHMS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "best_of_n": (search.best_of_n, {"n": 12, "score": path_reward}),
    "self_consistency": (search.self_consistency, {"n": 12, "early_stop": None}),
    "step_beam_search": (
        search.step_beam_search,
        {"width": 2, "branching": 6, "score": treasure},
    ),
    "diverse_verifier_tree_search": (
        search.diverse_verifier_tree_search,
        {"n": 12, "width": 6, "score": treasure},
    ),
    "rebase": (search.rebase, {"n": 12, "score": treasure}),
    "tree_of_thoughts": (
        search.tree_of_thoughts,
        {"breadth": 3, "branching": 6, "depth": 3, "score": treasure, "delimiter": "\n\n"},
    ),
    "tree_of_thoughts_dfs": (
        search.tree_of_thoughts,
        {
            "breadth": 2,
            "branching": 5,
            "depth": 3,
            "score": treasure,
            "delimiter": "\n\n",
            "method": "dfs",
        },
    ),
    "mcts": (
        search.mcts,
        {"rollouts": 24, "parallel": 6, "branching": 4, "depth": 3, "score": path_reward},
    ),
    "self_refine": (
        search.self_refine,
        {"criticise": lambda node: search.Critique(" Again?"), "attempts": 3},
    ),
    "probe_early_exit": (
        search.probe_early_exit,
        {"every": 6, "suffix": " so?", "probe_tokens": 4, "agree": 3},
    ),
}


def run(fn: Callable[..., Any], *args: Any, backend: str = "asyncio", **kwargs: Any) -> Any:
    return search.run(fn, *args, backend=backend, **kwargs)


def check_laws(
    result: SearchResult,
    llm: LLM,
    root: Branch,
    *,
    before: Mapping[str, int],
    in_use: int,
    rescore: bool = True,
) -> None:
    """What holds after every search, however it ended, where nothing else ran."""
    nodes = result.tree.nodes
    sampled = sum(node.num_sampled for node in nodes)
    after = llm.metrics
    assert result.usage.exact
    assert result.usage.tokens_generated == sampled
    assert sampled == after["generated_tokens"] - before["generated_tokens"]
    computed = after["prompt_tokens_computed"] - before["prompt_tokens_computed"]
    assert result.usage.prompt_tokens_computed == computed
    # Nothing is sent twice: given tokens are the root's and what was forced, each at most once.
    forced = sum(x is None for node in nodes for x in node.logprobs)
    assert computed <= forced
    assert llm.memory().in_use <= in_use, "a block is still held"
    assert root.alive and len(root.children) == 0
    again = SearchResult.model_validate_json(result.model_dump_json())
    assert again == result and str(again.tree) == str(result.tree)
    for node in nodes:
        assert node._branch is None
        assert "".join(node.token_texts) or not node.token_ids or node.token_ids == [EOS]
    for candidate in result.candidates:
        node = nodes[candidate.node_id]
        assert node.state != "pruned"
        assert candidate.finished == (node.state == "finished")
        assert candidate.text == "".join(each.text for each in node.path)
        if rescore and all(x is not None for x in candidate.logprobs):
            [score] = root.score([candidate.token_ids]).result()
            assert abs(score.total - candidate.logprob) < 1e-3
    if result.best is not None and result.candidates:
        finished = [c for c in result.candidates if c.finished]
        assert result.best.finished or not finished


def cancel_at(event_number: int, scope: anyio.CancelScope) -> Callable[[Any], None]:
    """An ``on_event`` that cancels a scope at the n-th event."""
    counter = itertools.count()

    def on_event(event: Any) -> None:
        if next(counter) == event_number:
            scope.cancel()

    return on_event
