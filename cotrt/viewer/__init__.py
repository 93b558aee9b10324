"""Trees of searches as pages: one self-contained HTML file, no network."""

from __future__ import annotations

from cotrt.viewer.page import render_html, save_html

__all__ = ["render_html", "save_html"]
