"""Votes: tables, extraction, equivalence, weights, and when a vote may stop."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
from search_helpers import PROMPT, run, small_llm, text_model

from cotrt import InvalidRequestError, SamplingParams, search, viewer
from cotrt.search.answers import as_extractor, boxed, final_answer, last_number
from cotrt.search.result import Vote
from cotrt.search.self_consistency import Ballot
from cotrt.search.stopping import posterior, posterior_bar

PARAMS = SamplingParams(max_tokens=200)
TEXTS = {"so it is 4": 5.0, "I say 5": 2.0, "it is 4.0": 2.0, "no idea": 1.0}


def test_the_table_accounts_for_every_sample() -> None:
    with small_llm(text_model(TEXTS)) as llm:
        result = run(search.self_consistency, llm, PROMPT, n=40, early_stop=None, params=PARAMS)
        table = result.votes
        assert result.answer == "4" == table.rows[0].answer
        assert len(table.votes) == 40 == len(result.candidates)
        assert sum(row.votes for row in table.rows) == sum(vote.counted for vote in table.votes)
        assert sum(vote.tokens for vote in table.votes) == result.usage.tokens_generated
        for index, row in enumerate(table.rows):
            own = [vote for vote in table.votes if vote.group == index]
            assert [vote.node_id for vote in own] == row.node_ids and len(own) == row.votes
            assert row.tokens == sum(vote.tokens for vote in own)
        assert result.best.answer == "4" and result.best.node_id in table.rows[0].node_ids
        assert [row.weight for row in table.rows] == sorted(
            (row.weight for row in table.rows), reverse=True
        )
        assert "not counted" in str(table)


def test_truncated_samples_are_marked_and_do_not_vote() -> None:
    model = text_model({"4": 1.0, "5 5 5 5 5 5 5 5 5 5 5": 3.0})
    for count_truncated, answer in ((False, "4"), (True, "5")):
        with small_llm(model) as llm:
            result = run(
                search.self_consistency,
                llm,
                PROMPT,
                n=20,
                early_stop=None,
                count_truncated=count_truncated,
                params=SamplingParams(max_tokens=8),
            )
            assert result.answer == answer
            cut = [vote for vote in result.votes.votes if not vote.finished]
            assert cut and all(vote.counted == count_truncated for vote in cut)


def test_early_stop_prunes_what_runs_at_once() -> None:
    model = text_model({"7": 9.0, "7 " * 300: 3.0, "8 " * 200: 1.0})
    for early_stop in ("posterior", "window"):
        with small_llm(model) as llm:
            result = run(
                search.self_consistency,
                llm,
                PROMPT,
                n=24,
                early_stop=early_stop,
                params=SamplingParams(max_tokens=1000),
                every=8,
            )
            assert result.stopped_by == "decided" and result.answer == "7"
            pruned = [node for node in result.tree.nodes if node.state == "pruned"]
            assert pruned and all(node.num_sampled == 8 for node in pruned)
            assert all(node.id not in result.candidate_ids for node in pruned)
            assert llm.memory().in_use == 0


def test_equivalence_and_extraction_are_the_programs_own() -> None:
    async def extract(text: str):
        return text.split()[-1] if text else None

    async def equal(a: str, b: str) -> bool:
        return abs(float(a) - float(b)) < 1e-9 if "idea" not in a + b else a == b

    with small_llm(text_model(TEXTS)) as llm:
        result = run(
            search.self_consistency,
            llm,
            PROMPT,
            n=30,
            extract=extract,
            equal=equal,
            early_stop=None,
            params=PARAMS,
        )
        answers = [row.answer for row in result.votes.rows]
        assert answers[0] in ("4", "4.0") and len(answers) == 3
        with pytest.raises(InvalidRequestError, match="not hashable"):
            run(search.self_consistency, llm, PROMPT, extract=lambda text: [text], params=PARAMS)
        with pytest.raises(InvalidRequestError, match="weight gave"):
            run(search.self_consistency, llm, PROMPT, weight=lambda n: math.nan, params=PARAMS)


def test_votes_weighted_by_logprob() -> None:
    with small_llm(text_model(TEXTS)) as llm:
        result = run(
            search.self_consistency,
            llm,
            PROMPT,
            n=20,
            weight="logprob",
            early_stop=None,
            params=PARAMS,
        )
        nodes = result.tree.nodes
        for vote in result.votes.votes:
            mean = nodes[vote.node_id].logprob / nodes[vote.node_id].num_sampled
            assert math.isclose(vote.weight, math.exp(mean))


def test_where_nobody_voted_there_is_no_answer_and_text_and_page_say_so(tmp_path: Path) -> None:
    with small_llm(text_model({"a 7 that is cut": 1.0, "an 8 that is cut": 1.0})) as llm:
        params = SamplingParams(max_tokens=4)
        result = run(search.self_consistency, llm, PROMPT, n=6, early_stop=None, params=params)
    assert result.answer is None and not result.votes.rows
    assert result.best is not None
    said = "no answer: none of 6 samples voted, 6 of them were cut"
    assert said in str(result.tree)
    viewer.save_html(result.tree, tmp_path / "tree.html")
    assert said in (tmp_path / "tree.html").read_text()


def test_extractors() -> None:
    assert boxed(r"a \boxed{\frac{1}{2}} b") == r"\frac{1}{2}"
    assert boxed(r"\boxed{3} then \boxed{}") == "3" and boxed(r"\boxed{3") is None
    assert last_number("from 3 to 1,024.50, e5") == "1024.5"
    assert last_number("it is -007") == "-7" and last_number("-0.0") == "0"
    assert last_number("v2 x3y") is None and last_number("") is None
    assert last_number("0.50") == "0.5" and last_number("10,00") == "0"
    assert final_answer(r"5 \boxed{1,000}") == "1000" and final_answer("so 5.") == "5"
    assert as_extractor(re.compile(r"is (\w+)"))("is a, is b") == "b"
    assert as_extractor(re.compile(r"\d"))("none") is None
    with pytest.raises(InvalidRequestError):
        as_extractor("numbers")
    with pytest.raises(InvalidRequestError):
        as_extractor(3)


def test_the_posterior_is_the_beta_mass_above_one_half() -> None:
    assert posterior(4, 0) == 31 / 32 and posterior(3, 3) == 0.5
    x = (np.arange(200_000) + 0.5) / 200_000
    for lead, second in ((5, 1), (9, 6), (20, 12)):
        density = x**lead * (1 - x) ** second
        assert math.isclose(
            posterior(lead, second), density[x > 0.5].sum() / density.sum(), rel_tol=1e-4
        )
    assert math.isclose(posterior(600, 550), 0.5 * math.erfc(-50 / math.sqrt(2 * 1151)))
    assert posterior_bar(8, 0.95) == 0.95 and 0.95 < posterior_bar(39, 0.95) < posterior(4, 0)


# Shares of the answers in the synthetic votes; the first is the worst case.
STREAMS = {
    "two equal": [0.5, 0.5],
    "55 to 45": [0.55, 0.45],
    "70 to 30": [0.7, 0.3],
    "40, 30, 30": [0.4, 0.3, 0.3],
    "five equal": [0.2] * 5,
    "30 and seven of 10": [0.3] + [0.1] * 7,
    "Zipf of ten": [1 / k for k in range(1, 11)],
}


def decide(counts_lead: np.ndarray, counts_second: np.ndarray, n: int, threshold: float):
    """Where the posterior's rule stops, for whole arrays of votes, by a table."""
    bar = posterior_bar(n, threshold)
    table = np.array(
        [[a > b and posterior(a, b) > bar for b in range(n + 1)] for a in range(n + 1)]
    )
    return table[counts_lead, counts_second]


def differing_share(shares: list[float], n: int, threshold: float, num_streams: int, seed: int):
    """(share of stopped votes whose leader differs from the full vote's, mean votes used)."""
    rng = np.random.default_rng(seed)
    p = np.array(shares) / sum(shares)
    draws = rng.choice(len(p), size=(num_streams, n), p=p)
    counts = np.cumsum(draws[:, :, None] == np.arange(len(p)), axis=1)  # [streams, t, answers]
    first = np.argmax(draws[:, :, None] == np.arange(len(p)), axis=1)  # when each was first seen
    first[counts[:, -1] == 0] = n
    # Ties go to the answer seen first.
    rank = counts * (n + 1) + (n - first)[:, None, :]
    order = np.argsort(rank, axis=2)
    lead, second = order[:, :, -1], order[:, :, -2]
    lead_votes = np.take_along_axis(counts, lead[:, :, None], 2)[:, :, 0]
    second_votes = np.take_along_axis(counts, second[:, :, None], 2)[:, :, 0]
    left = n - 1 - np.arange(n)
    stops = decide(lead_votes, second_votes, n, threshold) | (lead_votes - second_votes > left)
    stops[:, -1] = True
    at = np.argmax(stops, axis=1)
    rows = np.arange(num_streams)
    return float(np.mean(lead[rows, at] != lead[:, -1])), float(np.mean(at + 1))


@pytest.mark.parametrize("threshold", [0.9, 0.95, 0.99])
@pytest.mark.parametrize("name", STREAMS)
def test_a_stopped_vote_rarely_differs_from_the_full_one(name: str, threshold: float) -> None:
    for n in (8, 16, 24, 39, 40):
        differs, used = differing_share(STREAMS[name], n, threshold, 10_000, seed=n)
        assert differs <= 1 - threshold
        assert used <= n


def test_the_ballot_stops_where_the_simulation_says() -> None:
    async def stop_at(draws: list[int], n: int) -> int:
        ballot = Ballot(early_stop="posterior")
        for index, answer in enumerate(draws):
            await ballot.add(
                Vote(
                    node_id=index + 1,
                    answer=answer,
                    group=None,
                    weight=1.0,
                    tokens=1,
                    finished=True,
                    counted=True,
                )
            )
            if ballot.is_decided(n):
                return index + 1
        return n

    assert run(stop_at, [1] * 40, 40) == 4
    assert run(stop_at, [1, 2] * 20, 40) == 40
    assert run(stop_at, [1, 2, 1, 1, 1, 1, 1, 1] + [2] * 32, 40) == 7
    assert run(stop_at, [1] * 3, 4) == 3  # one vote cannot change it any more
