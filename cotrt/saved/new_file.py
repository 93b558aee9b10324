"""A file that appears under its name whole, or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from types import ModuleType, TracebackType
from typing import Any

from cotrt.errors import SavedBranchError

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # no POSIX system: leftovers cannot be told from living files, and stay
    fcntl = None

PREFIX = ".cotrt-saving-"
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class NewFile:
    """Bytes on their way to `path`, under a temporary name in the same folder until `commit`.

    The temporary file is locked as long as its writer lives, so that the next writer in the folder
    can tell what a dead one has left, and removes it.

    Args:
        path: where it is to appear; a file there is replaced.

    Attributes:
        size: bytes written so far.

    Raises:
        SavedBranchError: the folder is missing or may not be written, or `path` is no file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.realpath(path)
        self.size = 0
        self._folder = os.path.dirname(self.path)
        if os.path.basename(os.fspath(path)) in ("", ".", ".."):
            raise SavedBranchError(f"cannot save to {os.fspath(path)!r}: it names no file")
        try:
            kind = os.lstat(self.path).st_mode
        except FileNotFoundError:
            pass
        except OSError as error:
            raise self._failed(error) from error
        else:
            if not stat.S_ISREG(kind):
                what = "a folder: name a file in it" if stat.S_ISDIR(kind) else "no regular file"
                raise SavedBranchError(f"cannot save to {self.path}: it is {what}")
        try:
            self._fd, self._temporary = self._create()
        except OSError as error:
            raise self._failed(error) from error
        self._is_open = True

    def _create(self) -> tuple[int, str]:
        remove_leftovers(self._folder)
        while True:
            name = os.path.join(self._folder, PREFIX + secrets.token_hex(8))
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)
            fd = os.open(name, flags, 0o666)
            if _lock(fd) is not False and os.fstat(fd).st_nlink == 1:
                return fd, name
            os.close(fd)  # another writer took it for a leftover before it was locked

    def reserve(self, num_bytes: int) -> None:
        """Make sure that so many bytes have room, where the file system can tell.

        Raises:
            SavedBranchError: they have not.
        """
        if not hasattr(os, "posix_fallocate"):
            return
        try:
            os.posix_fallocate(self._fd, 0, num_bytes)
        except OSError as error:
            if error.errno in _NO_SPACE:
                raise self._failed(error, num_bytes) from error

    def write(self, data: Any) -> None:
        """Append bytes, or a contiguous array's.

        Raises:
            SavedBranchError: no space left, or another failure of the disk.
        """
        self.write_at(self.size, data)
        self.size += memoryview(data).nbytes

    def write_at(self, offset: int, data: Any) -> None:
        """Put bytes at `offset`."""
        view = memoryview(data)
        if not view.nbytes:
            return
        view = view.cast("B")
        try:
            while view:
                count = os.pwrite(self._fd, view, offset)
                view, offset = view[count:], offset + count
        except OSError as error:
            raise self._failed(error, offset + len(view)) from error

    def commit(self) -> None:
        """Let it appear: on the disk first, then under its name, then the name on the disk.

        Raises:
            SavedBranchError: the disk refused; nothing is left behind.
        """
        try:
            os.ftruncate(self._fd, self.size)
            os.fsync(self._fd)
            os.replace(self._temporary, self.path)
        except OSError as error:
            self.abort()
            raise self._failed(error) from error
        self._is_open = False
        os.close(self._fd)
        try:
            _sync_folder(self._folder)
        except OSError as error:
            raise SavedBranchError(
                f"{self.path} is written, but its folder could not be synchronised: "
                f"{error.strerror}; save again to be sure that it outlives a power failure"
            ) from error

    def abort(self) -> None:
        """Leave nothing behind. After `commit` it does nothing."""
        if self._is_open:
            self._is_open = False
            with contextlib.suppress(OSError):
                os.unlink(self._temporary)
            os.close(self._fd)

    def __enter__(self) -> NewFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abort()

    def _failed(self, error: OSError, num_bytes: int = 0) -> SavedBranchError:
        what = error.strerror or str(error)
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            what = f"there is no folder {self._folder}: make it first"
        elif error.errno in _NO_SPACE:
            what = (
                f"no space left for {num_bytes} bytes in {self._folder} ({what}): free some, or "
                "save elsewhere"
            )
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            what = f"no permission to write in {self._folder} ({what}): save elsewhere"
        return SavedBranchError(f"cannot save to {self.path}: {what}")


def remove_leftovers(folder: str) -> None:
    """Remove what dead writers have left in `folder`, and nothing of a living one's.

    Raises:
        OSError: the folder cannot be read.
    """
    if fcntl is None:
        return
    with os.scandir(folder) as found:
        names = [each.path for each in found if each.name.startswith(PREFIX)]
    for name in names:
        try:
            fd = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            if stat.S_ISREG(os.fstat(fd).st_mode) and _lock(fd) is True:
                os.unlink(name)
        except OSError:  # renamed just now, or not ours to remove
            pass
        finally:
            os.close(fd)


def _lock(fd: int) -> bool | None:
    """Lock a file for as long as it is open.

    Returns:
        False if somebody else has it locked; None if there are no locks here.
    """
    if fcntl is None:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks, where leftovers stay
        return None
    return True


def _sync_folder(folder: str) -> None:
    fd = os.open(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
