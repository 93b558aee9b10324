"""A folder that belongs to one process: removed at its end, or by the next one that starts here."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path

_PREFIX = "cotrt-kv-"
_LOCK = "lock"
# A folder without a lock is being made; after so many seconds its process is taken for gone.
_GRACE_SECONDS = 60.0


class PrivateFolder:
    """A new folder inside another; folders there whose process is gone are removed first.

    The process holds a file lock in its folder. A lock ends with its process, however that ended,
    and says so to others in the same file system; a process id might have been given out anew.

    Args:
        parent: where it is made; made itself if it is not there.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, parent: Path) -> None:
        parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(parent)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        self._pid = os.getpid()
        making = self.path / f"{_LOCK}-new"
        self._lock = os.open(making, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        _try_lock(self._lock)
        os.rename(making, self.path / _LOCK)  # from here on others look at it

    def remove(self) -> None:
        """Remove it with all that is in it; nothing in a forked child, whose it is not."""
        if os.getpid() == self._pid:
            shutil.rmtree(self.path, ignore_errors=True)
            with contextlib.suppress(OSError):
                os.close(self._lock)


def remove_abandoned(parent: Path) -> None:
    """Remove the private folders in `parent` whose process is gone."""
    for path in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if path.is_symlink() or not path.is_dir() or not _is_own(path):
                continue
            if _is_abandoned(path):
                shutil.rmtree(path, ignore_errors=True)


def _is_own(path: Path) -> bool:
    """Made by this user: a shared temporary folder has others' too."""
    return not hasattr(os, "getuid") or path.stat().st_uid == os.getuid()


def _is_abandoned(path: Path) -> bool:
    try:
        lock = os.open(path / _LOCK, os.O_RDWR | getattr(os, "O_CLOEXEC", 0))
    except FileNotFoundError:
        return time.time() - path.stat().st_mtime > _GRACE_SECONDS
    try:
        return _try_lock(lock)
    finally:
        os.close(lock)


def _try_lock(file: int) -> bool:
    """Whether nobody else holds the lock; where there are no such locks, False."""
    try:
        import fcntl
    except ImportError:  # Windows: a folder is removed at its process's end, or by hand
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
