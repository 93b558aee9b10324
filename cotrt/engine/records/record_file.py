"""One record in one file: a header with key, length and checksum, then the bytes.

A file appears under its name whole or not at all: it is written under another name and renamed. A
cut, flipped or foreign one is told by length, key and checksum.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import struct
from pathlib import Path

import numpy as np

from cotrt.plan import UInt8

MAGIC = b"cotrtKV\x01"
SUFFIX = ".2.kv"
# Of records whose keys were made from a sample of a model's weights: they may be another model's.
OLD_SUFFIX = ".kv"
# magic, key, tokens, bytes of the record, blake2b-128 of all that and of the record
_HEADER = struct.Struct("<8s32sIQ16s")
HEADER_BYTES = _HEADER.size


class BadRecordError(Exception):
    """A record's file is not what its name says."""


def name_of(key: bytes) -> str:
    """The file name of a record."""
    return key.hex() + SUFFIX


def is_old(name: str) -> bool:
    """Whether a file name is that of a record whose key no model has any more."""
    return key_of(name, OLD_SUFFIX) is not None


def key_of(name: str, suffix: str = SUFFIX) -> bytes | None:
    """The key of a file name; None where it is no record's."""
    if not name.endswith(suffix):
        return None
    try:
        key = bytes.fromhex(name[: -len(suffix)])
    except ValueError:
        return None
    return key if len(key) == 32 else None


def _checksum(key: bytes, num_tokens: int, record: UInt8) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    digest.update(struct.pack("<8s32sI", MAGIC, key, num_tokens))
    digest.update(record.data)
    return digest.digest()


def write(path: Path, temporary: Path, key: bytes, num_tokens: int, record: UInt8) -> int:
    """Write a record; it is there when this returns.

    Args:
        path: where it goes; one that is there is replaced.
        temporary: a name in the same folder that nobody else uses.

    Returns:
        Bytes of the file.

    Raises:
        OSError: it could not be written; nothing is left.
    """
    header = _HEADER.pack(MAGIC, key, num_tokens, record.size, _checksum(key, num_tokens, record))
    try:
        with open(temporary, "wb", buffering=0) as file:
            for part in (header, record.data):
                view = memoryview(part)
                while view:
                    view = view[file.write(view) :]
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return HEADER_BYTES + record.size


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def read(path: Path, key: bytes, max_bytes: int) -> UInt8:
    """Read a record of at most `max_bytes` and check it.

    It is read, not mapped: a file that is cut under a mapping ends the process.

    Raises:
        FileNotFoundError: there is none.
        BadRecordError: it is not the record of `key`.
        OSError: it cannot be read.
    """
    # Without blocking: to open a FIFO that nobody writes to would take for ever.
    with open(path, "rb", buffering=0, opener=_open_at_once) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise BadRecordError("it is no regular file")
        size = status.st_size
        if not HEADER_BYTES < size <= HEADER_BYTES + max_bytes:
            raise BadRecordError(
                f"it has {size} bytes, a record has up to {HEADER_BYTES + max_bytes}"
            )
        data = np.empty(size, np.uint8)
        view = data.data
        while view:
            count = file.readinto(view)
            if not count:
                raise BadRecordError(f"it ends {len(view)} bytes early")
            view = view[count:]
    magic, named, num_tokens, length, checksum = _HEADER.unpack_from(data.data)
    record = data[HEADER_BYTES:]
    if magic != MAGIC or named != key or length != record.size:
        raise BadRecordError("it is a record of something else")
    if checksum != _checksum(key, num_tokens, record):
        raise BadRecordError("its bytes and its checksum differ")
    return record
