"""The live page in headless Chromium: branches grow, fork, go; by mouse and by keyboard."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser
from isolation import shared_fixture
from server_rig import Rig, letters, running, scripted, slowly

from cotrt.server.live_view import LiveView

WORDS = "the quick brown fox thinks step by step and then again "


@shared_fixture()
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    made = Browser(tmp_path_factory.mktemp("profile"), width=1280, height=860)
    yield made
    made.close()


@shared_fixture()
def rig() -> Iterator[Rig]:
    llm = scripted(slowly(0.003, letters), kv_cache_memory_bytes=1 << 16, max_num_seqs=64)
    with running(llm, api_keys=("sk-live",)) as made:
        yield made


def wait(browser: Browser, expression: str, seconds: float = 20.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := browser.evaluate(expression)):
        assert time.monotonic() < deadline, f"it did not come to: {expression}"
        time.sleep(0.05)
    return value


def open_page(browser: Browser, rig: Rig, *, key: str) -> None:
    browser.errors.clear()
    browser.requests.clear()
    browser.page("Page.navigate", url=f"{rig.url}/")
    wait(browser, "document.getElementById('status') && document.readyState === 'complete'")
    if key:
        wait(browser, "document.getElementById('ask').open")
        browser.evaluate(
            f"document.getElementById('key').value = '{key}';"
            "document.getElementById('key-form').requestSubmit(); true"
        )
        wait(browser, "document.getElementById('status').textContent === 'live'")


def start(browser: Browser, text: str, n: int, tokens: int) -> None:
    browser.evaluate(
        f"document.getElementById('text').value = {text!r};"
        f"document.getElementById('n').value = {n};"
        f"document.getElementById('max').value = {tokens};"
        "document.getElementById('prompt').requestSubmit(); true"
    )


CARDS = "[...document.querySelectorAll('.card')]"
ROWS = "[...document.querySelectorAll('.branch')]"


def test_a_prompt_forks_streams_side_by_side_and_is_pruned(
    browser: Browser, rig: Rig, tmp_path: Path
) -> None:
    open_page(browser, rig, key="sk-live")
    start(browser, WORDS, 4, 60)
    wait(browser, f"{CARDS}.length === 4 && {ROWS}.length === 5")
    wait(browser, "document.querySelectorAll('.branch.running').length === 4")
    wait(browser, "Number(document.getElementById('s-running').textContent) === 4")
    wait(browser, f"{CARDS}.every(c => c.querySelector('pre').textContent.length === 55 + 60)")
    texts = browser.evaluate(f"{CARDS}.map(c => c.querySelector('pre').textContent)")
    leases = rig.service.branches.owned(next(iter(rig.service.branches._leases.values())).owner)
    assert sorted(texts) == sorted(lease.branch.text for lease in leases[1:])
    assert browser.evaluate("Number(document.getElementById('b-shared').textContent)") >= 3
    blocks = ["free", "private", "shared", "cached"]
    total = sum(
        browser.evaluate(f"Number(document.getElementById('b-{name}').textContent)")
        for name in blocks
    )
    assert total == rig.llm.memory().total

    # By keyboard: the second row, fork it; then the root, and everything goes.
    browser.evaluate("document.getElementById('max').value = 10; true")
    browser.evaluate("document.getElementById('branches').focus(); true")
    browser.key("ArrowDown")
    browser.key("ArrowDown")
    wait(browser, f"{ROWS}[1].getAttribute('aria-selected') === 'true'")
    browser.key("f")
    wait(browser, f"{ROWS}.length === 7 && {CARDS}.length === 2")
    wait(browser, "document.querySelectorAll('.branch.running').length === 0")
    for dark in (False, True):
        browser.dark(dark)
        browser.screenshot(tmp_path / f"live-{'dark' if dark else 'light'}.png")
    browser.dark(False)
    browser.key("Home")
    browser.key("x")
    wait(browser, f"{ROWS}.length === 0 && {CARDS}.length === 0")
    assert rig.llm.memory().in_use == 0
    # The first look, before the key was given, was refused; nothing else went wrong.
    assert [e for e in browser.errors if "401" not in e] == []
    assert all(url.startswith((rig.url, "data:")) for url in browser.requests)


def test_a_button_stops_and_prunes_what_runs(browser: Browser, rig: Rig) -> None:
    open_page(browser, rig, key="sk-live")
    start(browser, "abc", 2, 5000)
    wait(browser, "document.querySelectorAll('.branch.running').length === 2")
    browser.evaluate("document.querySelector('[aria-label^=\"Stop branch\"]').click(); true")
    wait(browser, "document.querySelectorAll('.branch.running').length === 1")
    browser.evaluate(
        "document.querySelectorAll('[aria-label^=\"Prune branch\"]').forEach(b => b.click()); true"
    )
    wait(browser, f"{ROWS}.length === 1")
    rig.wait_until(rig.is_idle, 5.0)
    browser.evaluate("select([...branches.keys()][0]); attempt(() => prune(selected)); true")
    wait(browser, f"{ROWS}.length === 0")


def test_what_runs_is_shown_first_and_then_what_was_used_last(browser: Browser, rig: Rig) -> None:
    open_page(browser, rig, key="sk-live")
    root = rig.post("/v1/branches", {"prompt": WORDS})
    children = rig.post(f"/v1/branches/{root['id']}/fork", {"n": 60})["data"]
    wait(browser, f"{ROWS}.length === 61 && {CARDS}.length === 24")
    first = (
        f"(() => {{ const found = {CARDS}.map(c => Number(c.ariaLabel.split(' ')[1]));"
        " return found.map(id => branches.get(id).lease); })()"
    )
    newest = [child["id"] for child in reversed(children)]
    assert browser.evaluate(first) == newest[:24]
    links = [
        rig.open(f"/v1/branches/{children[i]['id']}/generate", {"max_tokens": 60_000})
        for i in (3, 40)
    ]
    running = [children[3]["id"], children[40]["id"]]
    wait(browser, "document.querySelectorAll('.branch.running').length === 2")
    wait(browser, f"JSON.stringify({first}.slice(0, 2)) === JSON.stringify({running})")
    rig.post(f"/v1/branches/{children[10]['id']}/extend", {"text": "x"})
    then = [*running, children[10]["id"], newest[0]]
    wait(browser, f"JSON.stringify({first}.slice(0, 4)) === JSON.stringify({then})")
    browser.evaluate(f"{CARDS}[1].querySelectorAll('button')[3].focus(); true")
    links[0].close()  # it goes behind what still runs, before what was used earlier
    then = [running[1], running[0], children[10]["id"], newest[0]]
    wait(browser, f"JSON.stringify({first}.slice(0, 4)) === JSON.stringify({then})")
    assert browser.evaluate(f"{CARDS}[0].contains(document.activeElement)")
    links[1].close()
    rig.wait_until(rig.is_idle, 5.0)
    rig.call("DELETE", f"/v1/branches/{root['id']}")
    wait(browser, f"{ROWS}.length === 0")
    assert [e for e in browser.errors if "401" not in e] == []


def test_500_live_branches_are_listed_and_only_some_are_cards(
    browser: Browser, rig: Rig, tmp_path: Path
) -> None:
    open_page(browser, rig, key="sk-live")
    root = rig.post("/v1/branches", {"prompt": WORDS})
    children = rig.post(f"/v1/branches/{root['id']}/fork", {"n": 499})["data"]
    wait(browser, f"{ROWS}.length === 500")
    assert browser.evaluate(f"{CARDS}.length") == 24
    assert "475 more" in browser.evaluate("document.getElementById('more').textContent")
    began = time.monotonic()
    browser.screenshot(tmp_path / "500.png")
    links = [
        rig.open(f"/v1/branches/{child['id']}/generate", {"max_tokens": 20, "seed": i})
        for i, child in enumerate(children[:60])
    ]
    wait(browser, "document.querySelectorAll('.branch.running').length > 0")
    rig.wait_until(rig.is_idle, 30.0)
    for link in links:
        link.close()
    wait(browser, f"{ROWS}.filter(r => r.children[3].textContent === '75').length === 60")
    assert browser.evaluate("document.querySelectorAll('.branch').length") == 500
    assert time.monotonic() - began < 60
    rig.call("DELETE", f"/v1/branches/{root['id']}")
    wait(browser, f"{ROWS}.length === 0")
    assert [e for e in browser.errors if "401" not in e] == []


def test_text_is_shown_to_its_owner_alone() -> None:
    with running(scripted(letters), api_keys=("one", "two")) as rig:
        made = rig.post("/v1/branches", {"prompt": "secret"})
        owner = rig.service.branches._leases[made["id"]].owner
        mine = LiveView(rig.service, owner).changes()["branches"]
        theirs = LiveView(rig.service, "other").changes()["branches"]
        assert mine[0]["text"] == "secret" and mine[0]["lease"] == made["id"]
        assert "text" not in theirs[0] and "lease" not in theirs[0]
        assert theirs[0]["tokens"] == 6


def test_a_view_tells_only_what_is_new() -> None:
    with running(scripted(letters)) as rig:
        view = LiveView(rig.service, "")
        made = rig.post("/v1/branches", {"prompt": "abcdef"})
        first = view.changes()
        assert first["branches"][0]["text"] == "abcdef" and first["blocks"]
        assert view.changes() == {}
        rig.post(f"/v1/branches/{made['id']}/extend", {"text": "gh"})
        assert view.changes()["branches"][0]["text"] == "gh"
        rig.post(f"/v1/branches/{made['id']}/truncate", {"length": 2})
        again = view.changes()["branches"][0]
        assert again["reset"] and again["text"] == "ab"
        rig.call("DELETE", f"/v1/branches/{made['id']}")
        assert view.changes()["gone"]


def test_the_page_loads_nothing_from_outside(rig: Rig) -> None:
    status, html, headers = rig.call("GET", "/")
    assert status == 200
    assert "http://" not in html and "https://" not in html and "src=" not in html
    assert "default-src 'none'" in headers["content-security-policy"]
