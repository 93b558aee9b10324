"""Probes: they see the answer coming, and the thinking branch never notices."""

from __future__ import annotations

from search_helpers import PROMPT, counting_model, probabilities, run, small_llm

from cotrt import SamplingParams, search
from cotrt.search import Budget
from cotrt.testing import ScriptedModel

SUFFIX = "\nAnswer:"


def thinking_model() -> ScriptedModel:
    """Thinks for ever; asked, it answers 1, and 2 from the 20th token of thinking on."""

    def next_probs(ids: list[int]) -> dict[int, float]:
        text = "".join(map(chr, ids))
        if SUFFIX in text:
            thought = text[len(PROMPT) :].partition(SUFFIX)[0]
            answer = " 1." if len(thought) < 20 else " 2."
            return probabilities({answer: 1.0}, text.rpartition(SUFFIX)[2])
        return {97 + (len(ids) * k) % 26: 1.0 / k for k in range(1, 5)}

    return ScriptedModel(next_probs, vocab_size=128, eos_token_id=0)


def test_it_stops_when_the_probes_agree() -> None:
    with small_llm(thinking_model()) as llm:
        result = run(
            search.probe_early_exit,
            llm,
            PROMPT,
            every=8,
            suffix=SUFFIX,
            agree=3,
            params=SamplingParams(max_tokens=1000),
        )
        assert result.stopped_by == "agreed" and result.answer == "2"
        probes = [node for node in result.tree.nodes if node.kind == "probe"]
        assert [probe.answer for probe in probes] == ["1", "1", "2", "2", "2"]
        assert result.best.node_id == probes[-1].id and result.best.finished
        assert all(probe.state == "pruned" for probe in probes[:-1])
        thinking = sum(n.num_sampled for n in result.tree.nodes if n.kind == "step")
        assert thinking == 5 * 8
        assert result.usage.tokens_generated == thinking + sum(p.num_sampled for p in probes)
        assert llm.memory().in_use == 0


def test_probes_do_not_disturb_the_thinking() -> None:
    params = SamplingParams(max_tokens=60, seed=21, frequency_penalty=0.3, stop="zz")
    with small_llm(thinking_model()) as llm:
        with llm.branch(PROMPT) as root:
            plain = root.generate(params).result().token_ids
        result = run(
            search.probe_early_exit,
            llm,
            PROMPT,
            every=7,
            suffix=SUFFIX,
            agree=1000,
            params=params,
        )
        thought = [t for n in result.tree.nodes if n.kind == "step" for t in n.token_ids]
        assert thought == plain
        probes = [node for node in result.tree.nodes if node.kind == "probe"]
        assert len(probes) == 8


def test_thinking_that_ends_by_itself_is_the_answer() -> None:
    from search_helpers import text_model

    with small_llm(text_model({"so it is 12": 1.0})) as llm:
        result = run(
            search.probe_early_exit,
            llm,
            PROMPT,
            every=4,
            suffix=" say",
            params=SamplingParams(max_tokens=100),
        )
        assert result.answer == "12" and result.best.text == "so it is 12" and result.best.finished


def test_probes_count_in_the_budget() -> None:
    with small_llm(counting_model()) as llm:
        budget = Budget(max_tokens=50)
        result = run(
            search.probe_early_exit,
            llm,
            PROMPT,
            every=8,
            probe_tokens=8,
            suffix="so",
            params=SamplingParams(max_tokens=1000),
            budget=budget,
        )
        assert result.stopped_by == "max_tokens"
        assert llm.metrics["generated_tokens"] == 50 == budget.spent_tokens
