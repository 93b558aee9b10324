"""One page for one tree: data, style and program in a single file."""

from __future__ import annotations

import html
import json
import os
from importlib import resources
from pathlib import Path
from typing import Any

from cotrt.errors import InvalidRequestError
from cotrt.search.result import SearchResult
from cotrt.search.tree import Node, SearchTree


def save_html(
    tree: SearchTree | SearchResult, path: str | os.PathLike[str], *, title: str | None = None
) -> Path:
    """Write a page that shows a tree: pan, zoom, fold, look into every node.

    Args:
        tree: of a search, or the search's result.
        path: the file.
        title: of the page; default: the search's name.

    Returns:
        The path.

    Raises:
        OSError: the file cannot be written.
        InvalidRequestError: `tree` is something else.
    """
    target = Path(path)
    page = render_html(tree, title=title)
    # A lone surrogate, which a user's own tokenizer may give, has no UTF-8 form.
    target.write_text(page, encoding="utf-8", errors="replace", newline="\n")
    return target


def render_html(tree: SearchTree | SearchResult, *, title: str | None = None) -> str:
    """The page as text; model output in it is data, never markup."""
    if isinstance(tree, SearchResult):
        tree = tree.tree
    if not isinstance(tree, SearchTree):
        raise InvalidRequestError(
            f"a page is drawn of a search's tree, not of a {type(tree).__name__}: give the result "
            "of a search of cotrt.search, or its .tree"
        )
    files = resources.files("cotrt.viewer")
    read = {
        name: (files / name).read_text("utf-8") for name in ("page.html", "page.css", "page.js")
    }
    parts = {
        "{{title}}": html.escape(title or tree.algorithm),
        "{{style}}": read["page.css"],
        "{{data}}": _as_script_data(_data(tree)),
        "{{program}}": read["page.js"],
    }
    page = read["page.html"]
    # In one pass: what is filled in is never looked at again.
    head, *rest = page.split("{{")
    return head + "".join(
        parts["{{" + name + "}}"] + after for name, after in (r.split("}}", 1) for r in rest)
    )


def _data(tree: SearchTree) -> dict[str, Any]:
    winners = [] if tree.best_id is None else [0, *(node.id for node in tree.path(tree.best_id))]
    return {
        "algorithm": tree.algorithm,
        "winners": winners,
        "nodes": [_node(node) for node in tree.nodes],
    }


def _node(node: Node) -> dict[str, Any]:
    data = node.model_dump(mode="json", exclude={"logprob", "num_sampled", "copied_from"})
    data["logprobs"] = [None if x is None else round(x, 4) for x in node.logprobs]
    data["answer"] = None if node.answer is None else str(node.answer)
    return data


def _as_script_data(data: Any) -> str:
    """JSON that cannot end its script element, nor open a comment in it."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
