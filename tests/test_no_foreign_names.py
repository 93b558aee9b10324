"""No committed file names a package registry's host or a path of the machine it was written on."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

# Spelled in parts, so that this file passes its own test.
_HOSTS = [
    ("pypi", "org"),
    ("pythonhosted", "org"),
    ("download.pytorch", "org"),
    ("registry.npmjs", "org"),
    ("deb.debian", "org"),
    ("crates", "io"),
    ("proxy.golang", "org"),
    ("repo.maven.apache", "org"),
    ("rubygems", "org"),
    ("conda.anaconda", "org"),
]
_FOLDERS = [
    ("work", r"(main|shared|\.library|[\w.-]+)"),
    ("root", r"[\w.]+"),
    ("home", r"[\w.-]+"),
    ("Users", r"[\w.-]+"),
    ("opt", r"(wheels|pypi)"),
    ("tmp", r"[\w.-]+"),
]
_FOREIGN = re.compile(
    "|".join(
        [re.escape(".".join(host)) for host in _HOSTS]
        + [rf"(?<![\w.~$}}>)-])/{folder}/{below}" for folder, below in _FOLDERS]
    )
)


def _committed_files(repository: Path) -> list[Path]:
    done = subprocess.run(
        ["git", "ls-files", "-z"], cwd=repository, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.skip("not a git checkout")
    return [repository / name for name in done.stdout.split("\0") if name]


def test_no_file_names_a_registry_or_a_machine_path(repository: Path) -> None:
    found = []
    for path in _committed_files(repository):
        if not path.is_file():
            continue
        text = path.read_bytes().decode("utf-8", errors="ignore")
        for number, line in enumerate(text.splitlines(), 1):
            if match := _FOREIGN.search(line):
                found.append(f"{path.relative_to(repository)}:{number}: {match.group()}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "https://" + "pypi" + ".org/simple",
        "see /" + "work/main/cotrt",
        '"/' + "tmp/x" + '"',
        "/" + "root/.cache",
        "PATH=/" + "home/me/bin",
    ],
)
def test_such_names_are_recognised(text: str) -> None:
    assert _FOREIGN.search(text)


@pytest.mark.parametrize(
    "text", ["~/.cache/cotrt", "the frame/work/that", "docs/tmp/x", "http://127.0.0.1:8000/home/x"]
)
def test_others_are_left_alone(text: str) -> None:
    assert not _FOREIGN.search(text)
