"""`keep` over HTTP: the engine's lease on KV, beside the server's lease on the branch."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from isolation import shared_fixture
from server_rig import Rig, letters, running, scripted

import cotrt


@shared_fixture()
def rig() -> Iterator[Rig]:
    with running(scripted(letters, kv_cache_memory_bytes=1 << 12)) as made:
        yield made


def lease_of(rig: Rig, branch: cotrt.Branch) -> dict[str, float]:
    return rig.get(f"/v1/branches/{branch.id}?full=false")


def test_keep_protects_the_kv_and_shortens_no_lease(rig: Rig) -> None:
    branch = cotrt.Client(rig.url).branch("abc", ttl=600)
    seq = rig.service.branches.find(branch.id, "").branch._seq
    branch.keep(30)
    assert 0 < seq.keep_until - time.monotonic() <= 30
    about = lease_of(rig, branch)
    assert about["ttl"] == 600 and about["expires_in"] > 500
    branch.keep(0)
    assert seq.keep_until <= time.monotonic()
    assert lease_of(rig, branch)["expires_in"] > 500
    branch.prune()


def test_a_kept_branch_outlives_its_ttl_used_or_not(rig: Rig) -> None:
    client = cotrt.Client(rig.url)
    branch, other = client.branch("abc", ttl=0.2), client.branch("abd", ttl=0.2)
    branch.keep(3000)
    assert lease_of(rig, branch)["expires_in"] > 2000  # and this was a use
    rig.wait_until(lambda: len(rig.service.branches) == 1)  # looking at it would renew its lease
    assert not other.alive and branch.alive and branch.text == "abc"
    branch.prune()


def test_ttl_beside_it_renews_the_lease(rig: Rig) -> None:
    branch = cotrt.Client(rig.url).branch("abc", ttl=600)
    path = f"/v1/branches/{branch.id}/keep"
    assert rig.post(path, {"ttl": 50})["ttl"] == 50
    assert rig.post(path, {"seconds": 70})["expires_in"] > 60
    assert rig.post(path, {"seconds": 1, "ttl": 90})["ttl"] == 90
    branch.prune()


def test_what_cannot_be_kept_is_refused_as_locally(rig: Rig) -> None:
    client = cotrt.Client(rig.url)
    branch = client.branch("x" * 800, ttl=600)
    branch.score("y").result()
    with pytest.raises(cotrt.InvalidRequestError, match="blocks would be kept in all"):
        branch.keep(60)
    with pytest.raises(cotrt.InvalidRequestError, match="seconds"):
        branch.keep(-1)
    with pytest.raises(cotrt.InvalidRequestError, match="at most 86400"):
        branch.keep(1e6)
    assert lease_of(rig, branch)["expires_in"] <= 600
    branch.prune()
