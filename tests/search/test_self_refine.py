"""Attempts and critiques: going on after, from within, and from before an attempt."""

from __future__ import annotations

import pytest
from search_helpers import PROMPT, run, small_llm, text_model

from cotrt import InvalidRequestError, SamplingParams, search
from cotrt.search import Critique

PARAMS = SamplingParams(max_tokens=60)
TEXTS = {"bad start, bad end": 1.0, "fine start, fine end": 1.0, "fine start, bad end": 3.0}


def test_an_attempt_that_is_done_wins() -> None:
    with small_llm(text_model(TEXTS)) as llm:
        result = run(
            search.self_refine,
            llm,
            PROMPT,
            criticise=lambda node: Critique(" Again?", keep=0),
            done=lambda node: node.text == "fine start, fine end",
            attempts=20,
            params=PARAMS,
        )
        assert result.stopped_by == "accepted"
        assert result.answer == "fine start, fine end"
        tries = [node for node in result.tree.nodes if node.kind == "step"]
        assert all(node.is_finished for node in tries) and len(result.candidates) == len(tries)
        # Every retry is a fork of the prompt and the critique: reflexion.
        assert all(len(node.path) <= 2 * len(tries) for node in tries)


def test_a_retry_keeps_the_good_beginning_and_counts_it_once() -> None:
    def criticise(node: search.Node) -> Critique | None:
        if "bad" not in node.path_text:
            return None
        good = node.text.find("bad")
        return Critique(keep=max(0, good)) if good >= 0 else Critique(keep=0)

    with small_llm(text_model(TEXTS)) as llm:
        root = llm.branch(PROMPT)
        before = llm.metrics["generated_tokens"]
        result = run(search.self_refine, root, criticise=criticise, attempts=20, params=PARAMS)
        assert result.stopped_by == "accepted" and result.best.text == "fine start, fine end"
        kept = [node for node in result.tree.nodes if node.kind == "kept"]
        for node in kept:
            assert node.num_sampled == 0 and node.copied_from is not None
            source = result.tree.nodes[node.copied_from]
            assert source.token_ids[: len(node.token_ids)] == node.token_ids
        sampled = llm.metrics["generated_tokens"] - before
        assert result.usage.tokens_generated == sampled
        assert result.usage.prompt_tokens_computed == len(PROMPT)
        [score] = root.score([result.best.token_ids]).result()
        assert abs(score.total - result.best.logprob) < 1e-3


def test_the_model_criticises_itself() -> None:
    def texts(ids):
        from search_helpers import probabilities

        text = "".join(map(chr, ids))
        if text.endswith("Flaw:") or "Flaw:" in text.rpartition("Retry:")[2]:
            return probabilities({" too short": 1.0}, text.rpartition("Flaw:")[2])
        if "Retry:" in text:
            return probabilities({" longer": 1.0}, text.rpartition("Retry:")[2])
        return probabilities({"x": 1.0}, text.rpartition("?")[2])

    from cotrt.testing import ScriptedModel

    with small_llm(ScriptedModel(texts, vocab_size=128, eos_token_id=0)) as llm:
        result = run(
            search.self_refine,
            llm,
            PROMPT,
            criticise="\nFlaw:",
            retry="\nRetry:",
            attempts=2,
            params=PARAMS,
        )
        assert result.answer == " longer" and result.stopped_by == "max_steps"
        kinds = [node.kind for node in result.tree.nodes]
        assert kinds == ["root", "step", "critique", "critique", "step"]


def test_the_best_attempt_wins_by_score() -> None:
    with small_llm(text_model(TEXTS)) as llm:
        result = run(
            search.self_refine,
            llm,
            PROMPT,
            criticise=lambda node: Critique("?", keep=0),
            score=lambda node: -len(node.text),
            attempts=6,
            params=PARAMS,
        )
        assert result.best.score == max(c.score for c in result.candidates)


def test_a_wrong_critique_is_refused() -> None:
    with small_llm(text_model(TEXTS)) as llm:
        for wrong in (3, Critique(keep=1000), Critique(keep=-1)):
            with pytest.raises(InvalidRequestError):
                run(
                    search.self_refine,
                    llm,
                    PROMPT,
                    criticise=lambda node, w=wrong: w,
                    params=PARAMS,
                )
        assert llm.memory().in_use == 0
