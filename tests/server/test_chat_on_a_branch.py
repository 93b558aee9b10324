"""A chat on a server's branch is the local chat, id by id."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest
from conversations import KINDS, talker
from server_rig import Rig, running

import cotrt
from cotrt import LLM, SamplingParams
from cotrt.server.live_view import LiveView

MESSAGES = ["he", "w he", "[ x /]", "he\nhe", "🦊 é"]


def local_ids(llm: LLM, cuts: list[int]) -> list[list[int]]:
    chat, ids = llm.start_chat(), []
    for message, cut in zip(MESSAGES, cuts):
        chat.send(message, temperature=0, max_tokens=cut).result()
        ids.append(chat.branch.token_ids)
    return ids


@pytest.mark.parametrize("cuts", [[40] * 5, [2, 40, 1, 0, 3]], ids=["whole", "cut"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_the_servers_branch_equals_the_local_chat(
    name: str, stream: bool, cuts: list[int], tmp_path: Path
) -> None:
    with talker(KINDS[name], tmp_path / "local") as llm:
        wanted = local_ids(llm, cuts)
    with running(talker(KINDS[name], tmp_path / "served")) as rig:
        branch = rig.post("/v1/branches", {"prompt": ""})["id"]
        rig.post(f"/v1/branches/{branch}/truncate", {"length": 0})
        messages: list[dict[str, Any]] = []
        for message, cut, ids in zip(MESSAGES, cuts, wanted):
            messages.append({"role": "user", "content": message})
            asked = {"messages": messages, "branch_id": branch, "max_tokens": cut, "temperature": 0}
            if stream:
                events = rig.events("/v1/chat/completions", {**asked, "stream": True})
                deltas = [event["choices"][0]["delta"] for event in events]
                text = "".join(delta.get("content") or "" for delta in deltas)
            else:
                reply = rig.post("/v1/chat/completions", asked)["choices"][0]
                text = reply["message"]["content"]
            messages.append({"role": "assistant", "content": text, "tool_calls": []})
            assert rig.get(f"/v1/branches/{branch}")["token_ids"] == ids, message


def test_half_of_a_pair_on_a_branch_is_a_400_and_changes_nothing(tmp_path: Path) -> None:
    with running(talker(KINDS["special tags"], tmp_path / "t")) as rig:
        branch = rig.post("/v1/branches", {"prompt": "he"})
        body = b'{"messages": [{"role": "user", "content": "\\ud83d"}], "branch_id": "%s"}'
        status, reply, _ = rig.call(
            "POST", "/v1/chat/completions", raw=body % branch["id"].encode()
        )
        assert status == 400, reply
        assert rig.get(f"/v1/branches/{branch['id']}")["num_tokens"] == branch["num_tokens"]


def test_a_request_cancelled_while_its_reply_starts_leaves_the_branch(tmp_path: Path) -> None:
    with running(talker(KINDS["special tags"], tmp_path / "t")) as rig:
        made = rig.post("/v1/branches", {"prompt": "he"})
        service = rig.service
        lease = service.branches._leases[made["id"]]
        before = lease.branch.token_ids
        rendering = {"messages": [{"role": "user", "content": "w"}]}
        real, scopes = service.branches.reply, []

        def reply(*args: Any) -> Any:
            started = real(*args)
            anyio.from_thread.run_sync(scopes[0].cancel)
            return started

        async def cancelled() -> None:
            with anyio.CancelScope() as scope:
                scopes.append(scope)
                await service.reply(lease, rendering, SamplingParams())
            assert scope.cancelled_caught

        service.branches.reply = reply
        service._threads = None
        anyio.run(cancelled)
        service._threads = None
        assert lease.branch.token_ids == before and not lease.branch._seq.is_busy


@pytest.mark.parametrize("name", ["llama", "metaspace", "bytes"])
def test_texts_of_a_remote_branch_and_of_the_live_page_follow_what_stands_before(
    name: str, tmp_path: Path
) -> None:
    kind = KINDS[name]
    with running(talker(kind, tmp_path / "t")) as rig, cotrt.Client(rig.url) as client:
        remote = client.branch("he")
        start = len(remote)
        remote.extend(" he w🦊").extend(" he")
        [lease] = rig.service.branches.owned(_owner(rig))
        local = lease.branch
        for first in range(start, len(local)):
            assert remote.decode(first) == local.decode(first)
        assert remote.decode(start) == " he w🦊 he"
        view = LiveView(rig.service, lease.owner)
        shown = "".join(b["text"] for b in view.changes()["branches"] if b.get("lease"))
        assert shown == local.text
        local.extend(" w")
        [told] = [b for b in view.changes()["branches"] if b.get("lease")]
        assert told["text"] == " w"


def _owner(rig: Rig) -> str:
    [lease] = rig.service.branches._leases.values()
    return lease.owner


def test_the_live_page_shows_a_long_branch_from_inside_its_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cotrt.server.live_view._TAIL_TOKENS", 2)
    with running(talker(KINDS["llama"], tmp_path / "t")) as rig:
        rig.post("/v1/branches", {"prompt": "x he he"})
        view = LiveView(rig.service, _owner(rig))
        [told] = [b for b in view.changes()["branches"] if b.get("lease")]
        assert told["text"] == " he he"
