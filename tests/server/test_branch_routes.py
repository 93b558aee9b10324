"""Branches over HTTP by `cotrt.Client`: the verbs, leases, owners, bounds, a client that goes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import CancelledError

import pytest
from isolation import shared_fixture
from server_rig import Rig, counting, letters, running, scripted, slowly

import cotrt
from cotrt import SamplingParams

MESSAGES = [{"role": "user", "content": "hi"}]


@shared_fixture()
def rig() -> Iterator[Rig]:
    with running(scripted(letters, model_len=512)) as made:
        yield made


@pytest.fixture
def client(rig: Rig) -> Iterator[cotrt.Client]:
    made = cotrt.Client(rig.url)
    yield made
    made.branches().prune()
    rig.wait_until(rig.is_idle)
    assert rig.llm.memory().in_use == 0


def test_the_verbs_do_what_the_local_ones_do(rig: Rig, client: cotrt.Client) -> None:
    local, remote = rig.llm.branch("question: "), client.branch("question: ")
    seed = {"seed": 5, "max_tokens": 8}
    with local.fork(3) as ours, remote.fork(3) as theirs:
        mine = ours.generate(**seed).result()
        yours = theirs.generate(SamplingParams(**seed)).result()
        assert mine == yours
        assert theirs[1].token_ids == ours[1].token_ids
        assert theirs[1].logprobs == ours[1].logprobs
        assert theirs[1].sampled == ours[1].sampled
        assert theirs[1].text == ours[1].text
        for part in ((), (2,), (2, 5), (-3,), (4, -4), (5, 5)):
            assert theirs[1].decode(*part) == ours[1].decode(*part)
        assert theirs[1].decode(skip_special_tokens=True) == theirs[1].text
        options = ["yes", "no"]
        a = ours[0].score(options, given="? ").result()
        b = theirs[0].score(options, given="? ").result()
        assert [s.token_ids for s in a] == [s.token_ids for s in b]
        assert all(math.isclose(x.total, y.total, rel_tol=1e-6) for x, y in zip(a, b))
        assert theirs[0].score("yes").result().token_ids == list(map(ord, "yes"))
        mine_chosen = ours[0].choose(options).result()
        chosen = theirs[0].choose(options).result()
        assert (chosen.index, chosen.option) == (mine_chosen.index, mine_chosen.option)
        assert theirs[0].text == ours[0].text
        ours[2].extend(" and ").truncate(12)
        theirs[2].extend(" and ").truncate(12)
        assert theirs[2].text == ours[2].text and len(theirs[2]) == 12
        assert theirs[0].parent.id == remote.id and theirs[0].depth == 1
        assert {child.id for child in remote.children} == {b.id for b in theirs}
        assert theirs[0].kv.num_tokens == len(theirs[0])
    assert not theirs[0].alive and remote.alive
    local.prune()


def test_several_do_what_several_local_ones_do(rig: Rig, client: cotrt.Client) -> None:
    with (
        rig.llm.branch("question: ").fork(3) as ours,
        client.branch("question: ").fork(3) as theirs,
    ):
        each = ["one", [65, 66], "three"]
        assert [b.token_ids for b in theirs.extend(each)] == [
            b.token_ids for b in ours.extend(each)
        ]
        assert [b.text for b in theirs.extend("!")] == [b.text for b in ours.extend("!")]
        with pytest.raises(cotrt.InvalidRequestError, match="2 texts for 3 branches"):
            theirs.extend(["a", "b"])
        assert [b.text for b in theirs.truncate(11)] == [b.text for b in ours.truncate(11)]
        both = [branches.generate(max_tokens=8, seed=1).result() for branches in (ours, theirs)]
        assert both[0] == both[1]
        assert [b.text for b in theirs.finished] == [b.text for b in ours.finished]
        theirs[:2].close()
        assert [branch.alive for branch in theirs] == [False, False, True]


def test_logprobs_come_as_the_local_ones(rig: Rig, client: cotrt.Client) -> None:
    asked = SamplingParams(temperature=0, max_tokens=3, logprobs=2)
    ours = rig.llm.branch("abc").generate(asked).result()
    assert client.branch("abc").generate(asked).result() == ours


def test_chunks_add_up_and_every_reader_sees_all(client: cotrt.Client) -> None:
    branch = client.branch("abc")
    with branch.generate(max_tokens=20) as generation:
        first = "".join(chunk.text for chunk in generation)
        again = [i for chunk in generation for i in chunk.token_ids]
        output = generation.result()
    assert first == output.text and again == output.token_ids
    assert branch.text == "abc" + first


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_handles_are_awaited_in_both_loops(client: cotrt.Client, anyio_backend: str) -> None:
    branch = client.branch("abc")
    output = await branch.generate(max_tokens=5)
    assert len(output.token_ids) == 5
    texts = [chunk.text async for chunk in branch.generate(max_tokens=5)]
    assert len("".join(texts)) == 5
    assert (await branch.choose(["a", "b"])).option in ("a", "b")


def test_errors_are_of_the_local_kinds(client: cotrt.Client) -> None:
    branch = client.branch("abc")
    with pytest.raises(cotrt.InvalidRequestError, match="at"):
        branch.fork(at=9)
    with pytest.raises(cotrt.PromptTooLongError, match="512"):
        branch.extend("x" * 600)
    branch.prune()
    branch.prune()
    with pytest.raises(cotrt.BranchPrunedError):
        branch.extend("x")
    with pytest.raises(cotrt.InvalidRequestError):
        cotrt.Client("ftp://x")


def test_pruning_a_parent_takes_its_children(client: cotrt.Client) -> None:
    root = client.branch("abc")
    children = root.fork(3)
    grandchild = children[1].fork()[0]
    children[1].close()
    assert grandchild.alive and not children[1].alive
    root.prune()
    assert not grandchild.alive and len(client.branches()) == 0


def test_a_chat_goes_on_on_a_branch(rig: Rig, client: cotrt.Client) -> None:
    branch = client.branch(MESSAGES)
    asked = {"branch_id": branch.id, "max_tokens": 6, "stop": ["zz"]}
    first = rig.post("/v1/chat/completions", {"messages": MESSAGES, **asked})
    reply = first["choices"][0]["message"]
    assert branch.text.endswith("<assistant>" + reply["content"])
    more = [*MESSAGES, reply, {"role": "user", "content": "more"}]
    events = rig.events("/v1/chat/completions", {"messages": more, "stream": True, **asked})
    text = "".join(e["choices"][0]["delta"].get("content") or "" for e in events)
    assert branch.text.endswith("</s><user>more</s><assistant>" + text)
    status, _, _ = rig.call("POST", "/v1/chat/completions", {"messages": more, "n": 2, **asked})
    assert status == 400


def test_a_lease_ends_unless_it_is_used(rig: Rig, client: cotrt.Client) -> None:
    short, long = client.branch("abc", ttl=0.3), client.branch("abd", ttl=60)
    child = short.fork()[0]
    child.keep(60)
    rig.wait_until(lambda: len(client.branches()) == 2, 5.0)
    assert {b.id for b in client.branches()} == {long.id, child.id}
    assert child.text == "abc"
    status, _, _ = rig.call("POST", "/v1/branches", {"prompt": "a", "ttl": 1e8})
    assert status == 400


def test_branches_belong_to_the_key_that_made_them() -> None:
    with running(scripted(), api_keys=("one", "two"), max_branches_per_key=3) as rig:
        one, two = (cotrt.Client(rig.url, api_key=key) for key in ("one", "two"))
        branch = one.branch("secret")
        assert len(two.branches()) == 0
        stolen = f"/v1/branches/{branch.id}"
        headers = {"authorization": "Bearer two"}
        for method, path, body in [
            ("GET", stolen, None),
            ("DELETE", stolen, None),
            ("POST", f"{stolen}/fork", {}),
            ("POST", f"{stolen}/generate", {}),
            ("POST", "/v1/chat/completions", {"messages": MESSAGES, "branch_id": branch.id}),
        ]:
            assert rig.call(method, path, body, headers)[0] == 404
        branch.fork(2)
        with pytest.raises(cotrt.CotrtError, match="limit of 3"):
            one.branch("x")
        status, _, found = rig.call("POST", f"{stolen}/fork", {"n": 1})
        assert status == 429 and found["retry-after"]
        assert rig.call("POST", f"{stolen}/fork", {"n": 4})[0] == 400
        two.branch("y")


def test_a_generate_stops_when_it_is_cancelled_or_its_client_goes() -> None:
    with running(scripted(slowly(0.004, counting))) as rig:
        client = cotrt.Client(rig.url)
        branch = client.branch("abc")
        generation = branch.generate()
        next(iter(generation))
        with pytest.raises(cotrt.BranchBusyError):
            branch.extend("x")
        generation.cancel()
        output = generation.result(5)
        assert output.finish_reason == "abort" and output.token_ids
        rig.wait_until(rig.is_idle, 2.0)
        assert branch.token_ids[: 3 + len(output.token_ids)][3:] == output.token_ids
        for stream in (False, True):
            link = rig.open(f"/v1/branches/{branch.id}/generate", {"stream": stream})
            rig.wait_until(lambda: rig.llm.metrics["running"] == 1)
            link.close()
            rig.wait_until(rig.is_idle, 2.0)
        scoring = branch.score(["x" * 3000])
        scoring.cancel()
        with pytest.raises(CancelledError):
            scoring.result(5)
        rig.wait_until(rig.is_idle, 2.0)


def test_a_pruned_branch_that_runs_tells_its_reader() -> None:
    with running(scripted(slowly(0.004, counting))) as rig:
        client = cotrt.Client(rig.url)
        branch = client.branch("abc")
        generation = branch.generate()
        next(iter(generation))
        branch.prune()
        with pytest.raises(cotrt.BranchPrunedError):
            generation.result(5)
