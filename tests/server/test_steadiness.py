"""Short forms of the fuzz and the soak, and conversations that must not mix."""

from __future__ import annotations

import concurrent.futures
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from server_rig import running, scripted


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
    """What stands between the first colon and the bar, said again and again after the bar."""
    said = "".join(map(chr, ids))
    word = said.partition(":")[2].partition("|")[0]
    at = len(said) - said.index("|") - 1
    return {ord(word[at % len(word)]): 1.0}


def test_no_conversation_gets_anothers_words() -> None:
    """20 rounds of 24 clients, each with a branch that lives as long, and some that go away."""
    # A pool of 24 blocks for 48 conversations of 3 to 7: preemption all the time.
    llm = scripted(repeating, kv_cache_memory_bytes=24 * 16 * 4, max_num_seqs=16)
    words = [
        f"w{i:02d}-" + "".join(chr(97 + (i * 7 + k) % 26) for k in range(4)) for i in range(24)
    ]
    wrong: list[str] = []
    with running(llm) as rig:

        def ask(index: int) -> None:
            word = words[index]
            prompt = ("same start, " * 2 if index % 2 else "") + f"say:{word}|"
            branch = rig.post("/v1/branches", {"prompt": prompt})["id"]
            num_said = 0
            for turn in range(20):
                if (index + turn) % 5 == 0:
                    rig.open("/v1/completions", {"prompt": f"x:{word}|"}).close()
                asked = {"prompt": prompt, "max_tokens": len(word)}
                found = rig.post("/v1/completions", asked)["choices"][0]["text"]
                if found != word:
                    wrong.append(found)
                if (index + turn) % 2:
                    continue
                count = 1 + turn % 5
                asked = {"max_tokens": count}
                found = rig.post(f"/v1/branches/{branch}/generate", asked)["text"]
                if found != (word * 20)[num_said : num_said + count]:
                    wrong.append(found)
                num_said += count
            text = rig.get(f"/v1/branches/{branch}")["text"]
            if text != prompt + (word * 20)[:num_said]:
                wrong.append(text)
            rig.call("DELETE", f"/v1/branches/{branch}")

        with concurrent.futures.ThreadPoolExecutor(24) as pool:
            list(pool.map(ask, range(24)))
        assert wrong == []
        assert rig.llm.metrics["preemptions"] > 0
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
