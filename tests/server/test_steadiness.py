"""Short forms of the fuzz and the soak, and conversations that must not mix."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from server_rig import EOS, running, scripted


@pytest.fixture
def scripts(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(repository / "scripts" / "server"))
    for name in ("fuzz", "soak", "scripted_server"):
        sys.modules.pop(name, None)


@pytest.mark.slow
def test_malformed_requests_never_get_a_500(scripts: None) -> None:
    import fuzz

    statuses = fuzz.run(4000, seed=7, seconds=20)
    assert statuses[200] and statuses[400]


@pytest.mark.slow
def test_dropping_clients_leak_nothing_and_change_nobodys_text(scripts: None) -> None:
    import soak

    told = soak.run(32, seconds=8, seed=3)
    assert told["whole"] and told["dropped"]


def repeating(ids: Sequence[int]) -> Mapping[int, float]:
    """What stands between the first colon and the bar, said again after the bar."""
    said = "".join(map(chr, ids))
    word = said.partition(":")[2].partition("|")[0]
    at = len(said) - said.index("|") - 1
    return {ord(word[at]) if at < len(word) else EOS: 1.0}


def test_no_conversation_gets_anothers_words() -> None:
    # A pool of 30 blocks for 24 prompts of about 5: preemption all the time.
    llm = scripted(repeating, kv_cache_memory_bytes=30 * 16 * 4, max_num_seqs=16)
    words = [
        f"code-{i:02d}-" + "".join(chr(97 + (i * 7 + k) % 26) for k in range(30)) for i in range(24)
    ]
    wrong: list[str] = []
    with running(llm) as rig:

        def ask(index: int) -> None:
            for turn in range(3):
                if (index + turn) % 5 == 0:
                    rig.open("/v1/completions", {"prompt": f"x:{words[index]}|"}).close()
                prompt = ("same start, " * 2 if index % 2 else "") + f"say:{words[index]}|"
                reply = rig.post("/v1/completions", {"prompt": prompt, "max_tokens": 60})
                if reply["choices"][0]["text"] != words[index]:
                    wrong.append(reply["choices"][0]["text"])

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        rig.wait_until(rig.is_idle)
        assert rig.llm.memory().in_use == 0


def test_one_branch_used_by_two_clients_serves_one_and_refuses_the_other() -> None:
    from server_rig import counting, slowly

    with running(scripted(slowly(0.01, counting))) as rig:
        branch = rig.post("/v1/branches", {"prompt": "abc"})["id"]
        link = rig.open(f"/v1/branches/{branch}/generate", {"max_tokens": 50})
        rig.wait_until(lambda: rig.llm.metrics["running"] == 1)
        status, reply, _ = rig.call("POST", f"/v1/branches/{branch}/generate", {"max_tokens": 5})
        assert status == 409 and reply["error"]["code"] == "branch_busy"
        link.close()
