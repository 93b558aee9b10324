"""`cotrt.Client` keeps what came of a generate that was cut short, and names things as it does."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from isolation import shared_fixture
from server_rig import Rig, letters, running, scripted, slowly

import cotrt


@shared_fixture()
def slow() -> Iterator[Rig]:
    with running(scripted(slowly(0.004, letters))) as made:
        yield made


def after_some(generation: cotrt.Generation, count: int = 5) -> None:
    """Read until `count` tokens have come."""
    for chunk in generation:
        count -= len(chunk.token_ids)
        if count <= 0:
            return


def test_a_cancelled_generate_keeps_its_logprobs(slow: Rig) -> None:
    branch = cotrt.Client(slow.url).branch("abc")
    generation = branch.generate(logprobs=2)
    after_some(generation)
    generation.cancel()
    output = generation.result(5)
    slow.wait_until(slow.is_idle)
    assert output.finish_reason == "abort" and len(output.token_ids) >= 5
    count = len(output.token_ids)
    own = branch.logprobs[3 : 3 + count]
    assert [entry[i].logprob for i, entry in zip(output.token_ids, output.logprobs)] == own
    assert output.cumulative_logprob == sum(own) < 0
    chunks = list(generation)
    assert [value for chunk in chunks for value in chunk.logprobs] == own


def test_without_logprobs_a_cancelled_generate_has_their_sum_alone(slow: Rig) -> None:
    branch = cotrt.Client(slow.url).branch("abc")
    generation = branch.generate()
    after_some(generation)
    generation.cancel()
    output = generation.result(5)
    slow.wait_until(slow.is_idle)
    assert output.logprobs is None
    assert output.cumulative_logprob == sum(branch.logprobs[3 : 3 + len(output.token_ids)]) < 0


def test_a_pruned_generate_carries_what_was_made(slow: Rig) -> None:
    branch = cotrt.Client(slow.url).branch("abc")
    generation = branch.generate(logprobs=1)
    after_some(generation)
    branch.prune()
    with pytest.raises(cotrt.BranchPrunedError) as caught:
        generation.result(5)
    output = caught.value.output
    assert [i for chunk in generation._chunks for i in chunk.token_ids] == output.token_ids
    assert len(output.logprobs) == len(output.token_ids) >= 5
    found = [value for chunk in generation._chunks for value in chunk.logprobs]
    assert output.cumulative_logprob == sum(found)
    assert output.text == "".join(map(chr, output.token_ids))


def test_a_reply_in_one_piece_carries_it_too(slow: Rig) -> None:
    branch = cotrt.Client(slow.url).branch("abc")
    link = slow.open(f"/v1/branches/{branch.id}/generate", {})
    slow.wait_until(lambda: len(branch) > 5)
    branch.prune()
    with link, link.makefile("rb") as reply:
        assert reply.readline().split()[1] == b"409"
        body = reply.read()
    assert b'"code":"branch_pruned"' in body and b'"output":{"index":0,"text":"' in body


def test_a_model_that_breaks_carries_what_came_before() -> None:
    def breaks(ids: list[int]) -> dict[int, float]:
        return {97: math.nan if len(ids) > 6 else 1.0}

    with running(scripted(breaks)) as rig:
        with pytest.raises(cotrt.NumericsError) as caught:
            cotrt.Client(rig.url).branch("abc").generate(max_tokens=9).result(5)
        assert caught.value.output.text == "aaaa"


def test_a_busy_branch_is_named_as_the_client_knows_it(slow: Rig) -> None:
    branch = cotrt.Client(slow.url).branch("abc")
    with branch.generate() as generation:
        next(iter(generation))
        with pytest.raises(cotrt.BranchBusyError, match=f"^branch {branch.id} is generating"):
            branch.extend("x")
    slow.wait_until(slow.is_idle)
