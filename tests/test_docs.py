"""README and docs name only what is there, and their programs run."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = {
    page: "\n".join(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S))
    for page in PAGES
}


def _test_names(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = set()
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {
                f"{node.name}::{each.name}"
                for each in node.body
                if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))
            }
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?://)([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_and_tests_exist(page: Path) -> None:
    text = page.read_text()
    for path, name in re.findall(r"`(tests/[\w/]+\.py)(?:::([\w:]+))?`", text):
        assert (ROOT / path).is_file(), f"{page.name} names {path}"
        if name:
            assert name in _test_names(ROOT / path), f"{page.name} names {path}::{name}"
    for path in re.findall(r"`((?:cotrt|examples|docs)/[\w./]*)`", text):
        assert (ROOT / path).exists(), f"{page.name} names {path}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page, code in PROGRAMS.items() if code], ids=lambda page: page.name
)
def test_the_programs_of_a_page_run_as_one(page: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAMS[page])
    done = subprocess.run(
        [sys.executable, str(program)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_readme_shows_ten_lines() -> None:
    lines = [line for line in PROGRAMS[ROOT / "README.md"].splitlines() if line.strip()]
    assert len(lines) <= 10
