"""A new file appears whole or not at all, and what dead writers have left goes."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from killing import kill_while_saving

from cotrt.errors import SavedBranchError
from cotrt.saved import new_file
from cotrt.saved.new_file import PREFIX, NewFile


def test_it_appears_with_commit_and_not_before(tmp_path: Path) -> None:
    path = tmp_path / "b"
    with NewFile(path) as file:
        file.write(b"abc")
        assert not path.exists()
        file.write(memoryview(b"defg")[:3])
        file.write_at(1, b"X")
        file.commit()
        assert path.read_bytes() == b"aXcdef"
    assert os.listdir(tmp_path) == ["b"]


def test_it_replaces_what_is_there_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"old")
    os.symlink("b", tmp_path / "link")
    with NewFile(tmp_path / "link") as file:
        file.write(b"new")
        file.commit()
    assert os.readlink(tmp_path / "link") == "b"
    assert (tmp_path / "b").read_bytes() == b"new"


def test_the_umask_holds(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        with NewFile(tmp_path / "b") as file:
            file.commit()
    finally:
        os.umask(old)
    assert os.stat(tmp_path / "b").st_mode & 0o777 == 0o640


def test_leaving_without_commit_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"old")
    file = NewFile(tmp_path / "b")
    file.write(b"abc")
    file.__exit__(None, None, None)
    assert os.listdir(tmp_path) == ["b"]
    assert (tmp_path / "b").read_bytes() == b"old"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing/b", "there is no folder .*missing: make it first"),
        ("file/b", "there is no folder"),
        ("folder", "it is a folder: name a file in it"),
        ("folder/", "it names no file|it is a folder"),
        ("pipe", "it is no regular file"),
        ("x" * 300, "name too long|File name too long"),
    ],
)
def test_paths_that_cannot_be(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(SavedBranchError, match=message):
        NewFile(f"{tmp_path}/{name}")
    assert sorted(os.listdir(tmp_path)) == before


def test_no_device_is_replaced() -> None:
    with pytest.raises(SavedBranchError, match="it is no regular file"):
        NewFile("/dev/null")


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite", "fsync", "replace", "ftruncate"])
@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.ENOSPC, "no space left for"),
        (errno.EDQUOT, "no space left for"),
        (errno.EACCES, "no permission to write in"),
        (errno.EIO, "Input/output error"),
    ],
)
def test_a_disk_that_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, message: str
) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise OSError(number, os.strerror(number))

    def attempt() -> None:
        with NewFile(tmp_path / "b") as file:
            file.reserve(100)
            file.write(b"abc")
            file.commit()

    monkeypatch.setattr(os, call, refuse)
    if call == "posix_fallocate" and number not in (errno.ENOSPC, errno.EDQUOT):
        attempt()  # no file system has to know it
        return
    with pytest.raises(SavedBranchError, match=f"cannot save to .*{message}"):
        attempt()
    assert os.listdir(tmp_path) == []


def test_a_size_limit_of_the_process(tmp_path: Path) -> None:
    program = f"""
import resource
from cotrt.errors import SavedBranchError
from cotrt.saved.new_file import NewFile
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
with NewFile({str(tmp_path / "b")!r}) as file:
    try:
        file.write(bytes(2000))
    except SavedBranchError as error:
        print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert "no space left for 2000 bytes" in done.stdout
    assert os.listdir(tmp_path) == []


def test_leftovers_go_and_living_files_stay(tmp_path: Path) -> None:
    dead = tmp_path / (PREFIX + "0123")
    dead.write_bytes(b"x")
    (tmp_path / (PREFIX + "folder")).mkdir()
    os.symlink(tmp_path / "target", tmp_path / (PREFIX + "link"))
    (tmp_path / "target").touch()
    with NewFile(tmp_path / "first") as living:
        assert not dead.exists()
        living.write(b"abc")
        with NewFile(tmp_path / "second") as other:
            other.commit()
        living.commit()
    assert sorted(os.listdir(tmp_path)) == sorted(
        ["first", "second", "target", PREFIX + "folder", PREFIX + "link"]
    )


def test_where_there_are_no_locks_nothing_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / (PREFIX + "0123")).touch()

    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    assert new_file.fcntl is not None
    monkeypatch.setattr(new_file.fcntl, "flock", refuse)
    with NewFile(tmp_path / "b") as file:
        file.commit()
    monkeypatch.setattr(new_file, "fcntl", None)
    with NewFile(tmp_path / "b") as file:
        file.commit()
    assert sorted(os.listdir(tmp_path)) == [PREFIX + "0123", "b"]


def test_a_name_that_was_taken_for_a_leftover_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the making of a file and its lock another writer may look at it."""
    real, names = os.open, []

    def slow(path: Any, flags: int, *rest: Any) -> int:
        fd = real(path, flags, *rest)
        if PREFIX in str(path) and flags & os.O_CREAT:
            names.append(path)
            if len(names) == 1:
                new_file.remove_leftovers(str(tmp_path))
        return fd

    monkeypatch.setattr(os, "open", slow)
    with NewFile(tmp_path / "b") as file:
        file.write(b"abc")
        file.commit()
    assert len(names) == 2
    assert os.listdir(tmp_path) == ["b"]


def test_kill_9_at_any_moment_20_times(tmp_path: Path) -> None:
    whole, left = kill_while_saving(tmp_path, 20, seed=1)
    assert whole > 0
    assert left > 0
