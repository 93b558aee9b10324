"""The page of a tree in a real browser: it loads, opens nodes, escapes, stays offline."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser
from isolation import shared_fixture

from cotrt.search import Node, SearchResult, SearchTree
from cotrt.viewer import render_html, save_html

HOSTILE = (
    '</script><script>window.hacked = 1</script><img src=x onerror="hacked=2"><!-- {{data}} &amp;'
)
TEXTS = {
    "plain": "First I add 17 and 25.\n\nThat is 42.",
    "html": HOSTILE,
    "arabic": "الجواب هو ٤٢ لأن ١٧ + ٢٥ = ٤٢.\n\nانتهى",
    "hebrew": "התשובה היא 42 (כי 17 + 25).",
    "chinese": "首先，我们把十七和二十五相加，得到四十二。答案是 42。",
    "japanese": "まず17と25を足すと42になります。🦊🇯🇵 e\u0301",
    "long": "A very long line without a break: " + "x" * 3000 + "\n" + "word " * 600,
    "controls": "tab\there, escape \x1b[31m, override \u202egnp.exe, null \x00",
}


def add(tree: SearchTree, parent: Node, text: str, **fields) -> Node:
    node = tree.add(parent, fields.pop("kind", "step"))
    pieces = re.findall(r"\s*\S{1,6}|\s+", text)[:400]
    node.text, node.token_texts = text, pieces
    node.token_ids = list(range(100, 100 + len(pieces)))
    rng = random.Random(node.id)
    node.logprobs = [-rng.expovariate(1) if rng.random() < 0.9 else None for _ in pieces]
    for name, value in fields.items():
        setattr(node, name, value)
    return node


def texts_tree() -> SearchTree:
    tree = SearchTree(
        algorithm="step_beam_search",
        nodes=[Node(id=0, kind="root", text="What is 17 + 25? " + HOSTILE)],
    )
    for index, (name, text) in enumerate(TEXTS.items()):
        state = ("kept", "pruned", "finished", "cut")[index % 4]
        node = add(
            tree,
            tree.root,
            text,
            value=index / 7 - 0.5,
            score=index / 7,
            state=state,
            note="not among the best" if state == "pruned" else "",
            kv_shared_blocks=3 + index,
            kv_private_blocks=2 if name != "long" else 400,
        )
        if name in ("plain", "arabic", "chinese"):
            for _ in range(3):
                add(tree, node, text[::2], value=index / 10, state="finished", answer=HOSTILE)
    tree.best_id = 2 if tree.nodes[2].parent == 1 else len(tree.nodes) - 1
    return tree


def large_tree(count: int = 2000) -> SearchTree:
    rng = random.Random(1)
    tree = SearchTree(algorithm="mcts", nodes=[Node(id=0, kind="root", text="Question?")])
    open_ = [tree.root]
    while len(tree.nodes) < count:
        parent = rng.choice(open_[-40:])
        node = add(tree, parent, f"step {len(tree.nodes)} of some reasoning", value=rng.random())
        if rng.random() < 0.3:
            node.state = "pruned"
        else:
            open_.append(node)
    tree.best_id = count - 1
    return tree


@shared_fixture()
def browser(tmp_path_factory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def page(browser: Browser, tmp_path: Path) -> Browser:
    browser.size(1200, 800)
    browser.load(save_html(texts_tree(), tmp_path / "tree.html"))
    return browser


def click_node(page: Browser, node_id: int) -> None:
    place = page.evaluate(f"cotrt.position({node_id})")
    page.click(place["x"], place["y"])


def quiet(page: Browser) -> bool:
    return page.evaluate("window.hacked === undefined") and not page.errors


def test_it_loads_quietly_and_alone(page: Browser) -> None:
    assert page.evaluate("document.title") == "step_beam_search"
    assert page.evaluate("cotrt.shown") == len(texts_tree().nodes)
    assert "tokens sampled" in page.evaluate("document.getElementById('summary').textContent")
    assert quiet(page)
    assert all(url.startswith(("file:", "data:")) for url in page.requests) and page.requests


def test_a_click_opens_a_node_with_its_exact_text(page: Browser) -> None:
    tree = texts_tree()
    for node in tree.nodes:
        page.evaluate(f"cotrt.open({node.id})")
        page.evaluate("document.activeElement.blur()")
        click_node(page, node.id)
        assert page.evaluate("cotrt.selected") == node.id
        assert page.evaluate("location.hash") == f"#{node.id}"
        shown = page.evaluate(
            "[...document.querySelectorAll('.tabs button')].find(b => b.textContent === 'Text')"
            ".click(), document.getElementById('text').textContent"
        )
        assert shown == (node.text or "(no text)")
    assert quiet(page)


def test_tokens_show_their_logprobs_and_blocks_their_sharing(page: Browser) -> None:
    tree = texts_tree()
    node = tree.nodes[1]
    page.evaluate(
        "cotrt.open(1), [...document.querySelectorAll('.tabs button')]"
        ".find(b => b.textContent === 'Tokens').click()"
    )
    spans = page.evaluate(
        "[...document.querySelectorAll('.tokens > span')].map(s => [s.className, s.title])"
    )
    assert len(spans) == len(node.token_ids)
    for (kind, title), token, logprob in zip(spans, node.token_ids, node.logprobs):
        assert (kind == "forced") == (logprob is None) and f"token {token}" in title
        assert logprob is None or f"{round(logprob, 4):.3f}"[:5] in title
    assert page.evaluate("document.querySelectorAll('.strip b').length") == 5
    assert page.evaluate("document.querySelectorAll('.strip b.own').length") == 2
    long = next(node for node in tree.nodes if node.text == TEXTS["long"])
    page.evaluate(f"cotrt.open({long.id})")
    assert "400 private" in page.evaluate("document.getElementById('panel').textContent")
    assert page.evaluate("document.querySelectorAll('.strip b').length") == 2
    assert quiet(page)


def test_html_in_output_stays_text(page: Browser) -> None:
    for node in texts_tree().nodes:
        page.evaluate(f"cotrt.open({node.id})")
        for label in ("Tokens", "Text", "Whole path", "Prompt"):
            page.evaluate(
                "[...document.querySelectorAll('.tabs button')]"
                f".find(b => b.textContent === '{label}').click()"
            )
            assert (
                page.evaluate("document.querySelectorAll('#panel img, #panel script').length") == 0
            )
    assert page.evaluate("document.scripts.length") == 2
    assert quiet(page)


def test_folding_panning_zooming_and_keys(page: Browser) -> None:
    total = page.evaluate("cotrt.shown")
    page.evaluate("cotrt.open(1)")
    place = page.evaluate("cotrt.knob(1)")
    page.click(place["x"], place["y"])
    assert page.evaluate("cotrt.shown") == total - 3
    page.click(place["x"], place["y"])
    assert page.evaluate("cotrt.shown") == total
    place = page.evaluate("cotrt.position(1)")
    page.click(place["x"], place["y"], count=2)
    assert page.evaluate("cotrt.shown") == total - 3
    page.evaluate("cotrt.open(2)")  # what is folded away is opened again
    assert page.evaluate("cotrt.shown") == total

    before = page.evaluate("cotrt.position(1)")
    page.mouse("mousePressed", 300, 700, button="left", clickCount=1)
    page.mouse("mouseMoved", 350, 720, button="left", buttons=1)
    page.mouse("mouseReleased", 350, 720, button="left", clickCount=1)
    after = page.evaluate("cotrt.position(1)")
    moved = (after["x"] - before["x"], after["y"] - before["y"])
    assert moved == pytest.approx((50, 20))
    scale = page.evaluate("cotrt.scale")
    page.mouse("mouseWheel", 300, 300, deltaX=0, deltaY=-200)
    page.evaluate("new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)))")
    assert page.evaluate("cotrt.scale") > scale
    page.evaluate("document.getElementById('tree').focus(), cotrt.open(1)")
    page.key("ArrowRight")
    assert page.evaluate("cotrt.selected") == 2
    page.key("ArrowLeft")
    page.key("ArrowDown")
    assert page.evaluate("cotrt.selected") not in (1, 2)
    page.key("w")
    assert page.evaluate("cotrt.selected") == texts_tree().best_id
    page.key("p")
    assert page.evaluate("cotrt.shown") <= total
    assert quiet(page)


def test_two_thousand_nodes_stay_smooth(browser: Browser, tmp_path: Path) -> None:
    browser.load(save_html(large_tree(), tmp_path / "large.html"))
    assert browser.evaluate("cotrt.shown") == 2000
    # However many events come, one frame draws once; and it draws what is in view alone.
    drawn = browser.evaluate(
        """new Promise(async (done) => {
          const canvas = document.getElementById("tree");
          const frame = () => new Promise(r => requestAnimationFrame(() => setTimeout(r)));
          await frame();
          let texts = 0;
          const original = CanvasRenderingContext2D.prototype.fillText;
          CanvasRenderingContext2D.prototype.fillText = function (...a) {
            texts++;
            return original.apply(this, a);
          };
          const before = cotrt.frames;
          for (let i = 0; i < 500; i++)
            canvas.dispatchEvent(new WheelEvent("wheel",
              {deltaY: i % 2 ? 40 : -40, clientX: 300, clientY: 300, cancelable: true}));
          await frame();
          CanvasRenderingContext2D.prototype.fillText = original;
          done([cotrt.frames - before, texts]);
        })"""
    )
    frames, texts = drawn
    assert frames == 1 and texts < 300
    browser.evaluate("cotrt.fit()")
    browser.evaluate("cotrt.open(1999)")
    click_node(browser, 1999)
    assert browser.evaluate("cotrt.selected") == 1999
    assert quiet(browser)


def test_a_link_opens_a_node_and_an_empty_tree_is_no_error(
    browser: Browser, tmp_path: Path
) -> None:
    path = save_html(texts_tree(), tmp_path / "tree.html", title="Mine & <yours>")
    browser.load(path, "#3")
    assert browser.evaluate("cotrt.selected") == 3
    assert browser.evaluate("document.title") == "Mine & <yours>"
    browser.load(save_html(SearchTree(), tmp_path / "empty.html"))
    assert browser.evaluate("cotrt.shown") == 0 and quiet(browser)


def test_the_file_is_whole_and_escaped() -> None:
    text = render_html(texts_tree())
    assert text.count("</script>") == 2
    body = text.split('id="data">')[1].split("</script>")[0]
    assert [node["text"] for node in json.loads(body)["nodes"]] == [
        node.text for node in texts_tree().nodes
    ]
    assert not re.search(r"(?:src|href)\s*=\s*[\"']?https?:", text)


def test_a_result_and_odd_characters_can_be_saved(tmp_path: Path) -> None:
    tree = SearchTree(nodes=[Node(id=0, kind="root", text="half \ud83e")])
    result = SearchResult(algorithm="x", tree=tree)
    path = save_html(result, tmp_path / "odd.html")
    assert path.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
