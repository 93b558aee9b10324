"""What lies in a folder of records that several processes may use; leftovers are removed."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from cotrt.engine.records import record_file

# Of names of files that are being written; the id of the process follows.
TEMPORARY = ".cotrt-tmp-"
# A temporary file of a process that is gone, or older than this, is nobody's.
_STALE_SECONDS = 3600.0


def look(folder: Path) -> list[tuple[bytes, int, float]]:
    """Key, bytes and time of each record's file; temporary files of dead processes are removed.

    Raises:
        OSError: the folder cannot be read.
    """
    found: list[tuple[bytes, int, float]] = []
    now = time.time()
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if entry.name.startswith(TEMPORARY):
                    _remove_stale(entry, now)
                    continue
                key = record_file.key_of(entry.name)
                if key is not None and entry.is_file(follow_symlinks=False):
                    stat = entry.stat(follow_symlinks=False)
                    found.append((key, stat.st_size, stat.st_mtime))
    return found


def remove_old(folder: Path) -> int:
    """Remove records of an older version, whose keys no model has any more; how many there were.

    Raises:
        OSError: the folder cannot be read.
    """
    count = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            if record_file.is_old(entry.name):
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)
                    count += 1
    return count


def _remove_stale(entry: os.DirEntry[str], now: float) -> None:
    """Remove a temporary file whose process is gone."""
    owner = entry.name[len(TEMPORARY) :].partition("-")[0]
    if now - entry.stat().st_mtime < _STALE_SECONDS and owner.isdigit() and _is_alive(int(owner)):
        return
    os.unlink(entry.path)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is somebody else's
        return True
    return True
