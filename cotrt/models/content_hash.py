"""A hash of every byte of some files, kept so that they are read for it once.

A hash is kept in ``$COTRT_HOME/hashes`` under each file's path, size, inode, device and the times
of its last change of content and of status: where a file was replaced or written to it is made
again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..errors import ModelLoadError
from .starter import home

logger = logging.getLogger("cotrt")


def kept_hash(kind: str, files: Sequence[Path], make: Callable[[], bytes]) -> bytes:
    """A hash of files' content: the one that was kept, or else a new one.

    Args:
        kind: what is hashed and how; hashes of other kinds are not used.
        files: all that decides the hash.
        make: makes it, 32 bytes.

    Raises:
        ModelLoadError: a file cannot be read, or changes while the hash is made.
    """
    try:
        paths = [Path(os.path.realpath(path)) for path in files]
        state = [kind, *map(_state, paths)]
        note = _note(paths)
        kept = _kept(note, state)
        if kept is None:
            kept = make()
            if [kind, *map(_state, paths)] != state:
                raise ModelLoadError(
                    f"{files[0].parent}: a file was written to while it was read; load it again."
                )
            _keep(note, state, kept)
    except OSError as error:
        raise ModelLoadError(f"{error.filename or files[0]} cannot be read ({error}).") from error
    return kept


def _state(path: Path) -> dict[str, Any]:
    """What changes when the file does."""
    stat = os.stat(path)
    return {
        "path": str(path), "size": stat.st_size, "inode": stat.st_ino, "device": stat.st_dev,
        "mtime_ns": stat.st_mtime_ns, "ctime_ns": stat.st_ctime_ns,
    }  # fmt: skip


def _note(paths: Sequence[Path]) -> Path:
    name = hashlib.sha256("\0".join(map(str, paths)).encode(errors="surrogateescape"))
    return home() / "hashes" / f"{name.hexdigest()[:32]}.json"


def _kept(note: Path, state: list[Any]) -> bytes | None:
    """The hash that was kept of files in this state."""
    try:
        kept = json.loads(note.read_bytes())
        digest = bytes.fromhex(kept["hash"])
        known = kept["state"] == state
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return digest if known and len(digest) == 32 else None


def _keep(note: Path, state: list[Any], digest: bytes) -> None:
    temporary = note.with_name(f".{secrets.token_hex(8)}")
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps({"state": state, "hash": digest.hex()}))
        os.replace(temporary, note)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        logger.info("a hash of weights is made again next time: %s", error)
