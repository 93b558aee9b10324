"""A search tree as plain text for a terminal."""

from __future__ import annotations

import unicodedata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cotrt.search.tree import Node, SearchTree

_SIGNS = {"kept": "·", "pruned": "x", "finished": "o", "cut": "!"}
# Deeper nodes are not indented further: their depth is written instead.
_MAX_INDENT = 24


def render(tree: SearchTree, *, width: int = 100, max_nodes: int | None = None) -> str:
    """One line a node: mark, state, id, score, tokens, text; see `SearchTree.render`."""
    if not tree.nodes:
        return f"{tree.algorithm}: no nodes"
    winners = set()
    if tree.best_id is not None:
        winners = {0, *(node.id for node in tree.path(tree.best_id))}
    children: dict[int, list[Node]] = {}
    for node in tree.nodes[1:]:
        assert node.parent is not None
        children.setdefault(node.parent, []).append(node)

    sampled = sum(node.num_sampled for node in tree.nodes)
    lines = [
        (
            f"{tree.algorithm}: {len(tree.nodes) - 1} nodes, {sampled} tokens sampled   "
            "(* winner, o finished, x pruned, ! cut, · kept)"
        )
    ]
    # Depth first without recursion: (node, what stands before its children, its connector).
    stack: list[tuple[Node, str, str]] = [(tree.root, "", "")]
    shown = 0
    while stack:
        if max_nodes is not None and shown == max_nodes:
            lines.append(f"... and {len(tree.nodes) - shown} more nodes")
            break
        node, before, connector = stack.pop()
        shown += 1
        lines.append(_fit(f"{before}{connector}{_describe(node, node.id in winners)}", width))
        below = children.get(node.id, [])
        inner = before + {"├─": "│ ", "└─": "  "}.get(connector, "")
        if len(inner) > _MAX_INDENT:
            inner = inner[:_MAX_INDENT]
        if len(below) == 1 and node.id:
            # An only child stands below its parent, so that a long chain is not a staircase.
            stack.append((below[0], inner, ""))
        else:
            for place, child in reversed(list(enumerate(below))):
                stack.append((child, inner, "└─" if place == len(below) - 1 else "├─"))
    return "\n".join(lines)


def _describe(node: Node, wins: bool) -> str:
    parts = [f"{'*' if wins else ' '}{_SIGNS[node.state]} {node.id}"]
    if node.kind not in ("step", "root"):
        parts.append(node.kind)
    number = node.score if node.value is None else node.value
    if number is not None:
        parts.append(f"{number:.3f}")
    if node.visits > 1:
        parts.append(f"{node.visits}x")
    parts.append(f"{node.num_tokens}t")
    if node.answer is not None:
        parts.append(f"[{one_line(str(node.answer))}]")
    parts.append(f'"{one_line(node.text)}"')
    if node.note:
        parts.append(f"({one_line(node.note)})")
    return " ".join(parts)


def one_line(text: str) -> str:
    """Text that is safe in one line of a terminal: no newlines, no control characters."""
    plain = text.replace("\r\n", "⏎").replace("\n", "⏎").replace("\t", " ")
    return "".join(c if _is_printable(c) else "�" for c in plain)


def _is_printable(character: str) -> bool:
    # Cc: controls, terminal escapes begin with one. Cs: surrogates. Bidirectional overrides and
    # isolates (Cf) could turn the rest of the line around; joiners inside emoji and words may stay.
    category = unicodedata.category(character)
    if category == "Cf":
        return character in "\u200c\u200d"
    return category not in ("Cc", "Cs", "Zl", "Zp")


def _fit(line: str, width: int) -> str:
    """Cut to `width` columns; East Asian wide characters take two."""
    used = 0
    for index, character in enumerate(line):
        used += _columns(character)
        if used > width:
            kept = line[:index]
            while kept and sum(map(_columns, kept)) > width - 1:
                kept = kept[:-1]
            return kept + "…"
    return line


def _columns(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
