"""The key that says which saved branches an installation wrote itself.

A saved branch holds KV, and KV that is not what its tokens give would answer every later prompt
with those tokens. So a file's KV is shared with others only where a signature by this key
(HMAC-SHA256, RFC 2104) says that it was written here.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from cotrt.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

_LEAST_BYTES = 16
_MOST_BYTES = 1 << 16


def read_saved_key(given: bytes | str | os.PathLike[str] | None) -> bytes | None:
    """The key of an ``LLM(saved_key=...)``.

    Args:
        given: the key itself, a file that holds it, or None: the key of this installation, made in
            ``$COTRT_HOME`` when it is first wanted. Several processes may share it.

    Returns:
        None where this installation can have none: nothing is signed then, and no file trusted.

    Raises:
        InvalidRequestError: a file that cannot be read, or a key of less than 16 bytes.
    """
    if given is None:
        return _own_key()
    if isinstance(given, bytes):
        return _checked(given, "saved_key")
    return _checked(_read(Path(given)), f"saved_key={os.fspath(given)!r}")


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise InvalidRequestError(f"saved_key={str(path)!r}: cannot be read ({error})") from error


def _checked(key: bytes, what: str) -> bytes:
    if not _LEAST_BYTES <= len(key) <= _MOST_BYTES:
        raise InvalidRequestError(
            f"{what} has {len(key)} bytes: must have {_LEAST_BYTES} to {_MOST_BYTES}; "
            "secrets.token_bytes(32) makes one"
        )
    return key


def _own_key() -> bytes | None:
    """The key in ``$COTRT_HOME``, made if it is not there: whole, once, for its owner alone."""
    from cotrt.models.starter import home

    path = home() / "saved.key"
    try:
        with contextlib.suppress(FileNotFoundError):
            return _whole(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        made = path.with_name(f".saved.key-{os.getpid()}-{secrets.token_hex(8)}")
        descriptor = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(secrets.token_bytes(32))
                file.flush()
                os.fsync(file.fileno())
            with contextlib.suppress(FileExistsError):  # another process was faster: its key counts
                os.link(made, path)
        finally:
            os.unlink(made)
        return _whole(path)
    except OSError as error:
        _say_once(
            "saved branches are not signed, and KV of loaded ones is not shared with other "
            f"prompts: no key in {path.parent} ({error}); LLM(saved_key=...) names one"
        )
        return None


def _whole(path: Path) -> bytes:
    key = path.read_bytes()
    if len(key) < _LEAST_BYTES:
        raise OSError(f"{path} holds {len(key)} bytes, which is no key: remove it")
    return key


def _once() -> Callable[[str], None]:
    said: set[str] = set()

    def say(text: str) -> None:
        if text not in said:
            said.add(text)
            logger.warning(text)

    return say


_say_once = _once()
