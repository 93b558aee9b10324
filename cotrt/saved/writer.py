"""Writes a saved branch: tokens at once, KV in pieces as it comes, the header last."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np

from cotrt.errors import InvalidRequestError, SavedBranchError
from cotrt.plan import KVShape, UInt8
from cotrt.saved import layout
from cotrt.saved.layout import Chunk, SavedBranch
from cotrt.saved.new_file import NewFile


class SavedWriter:
    """Writes one file; it appears under its name with `finish`, and not before.

    Args:
        path: the file; one that is there is replaced.
        branches: the branches, parents before their children.
        planned: chunks of KV that may come, in the order in which they will.
        shape: layout of the KV.
        fingerprint: of the model.
        computed_under: what else decides the bits of the KV; empty where they are not promised.
        key: signs the file; None leaves it unsigned.

    Raises:
        SavedBranchError: the path cannot be written.
        InvalidRequestError: more branches, tokens or metadata than a file can hold, or metadata
            that JSON cannot hold.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        branches: Sequence[SavedBranch],
        *,
        planned: Sequence[Chunk],
        shape: KVShape,
        fingerprint: str,
        computed_under: str = "",
        key: bytes | None = None,
    ) -> None:
        self._key = key
        self._branches = branches
        self._shape = shape
        self._num_tokens = sum(len(branch.tokens) for branch in branches)
        for what, count, most in (
            ("branches", len(branches), layout.MAX_BRANCHES),
            ("tokens", self._num_tokens, layout.MAX_TOKENS),
            (f"chunks of {layout.CHUNK_TOKENS} tokens of KV", len(planned), layout.MAX_CHUNKS),
        ):
            if count > most:
                raise InvalidRequestError(
                    f"{count} {what} are more than a saved branch holds, {most}: save parts of the "
                    "tree in files of their own"
                )
        self._notes = layout.notes_of(branches)
        self._metadata = layout.metadata(
            len(branches), self._num_tokens, len(self._notes), fingerprint, shape, computed_under
        )
        self._chunks: list[Chunk] = []
        self._checksums: list[bytes] = []
        self._unsigned = "" if key is None else layout.NO_SIGNATURE
        most_header = layout.header(
            self._entries(planned), self._metadata, signature=self._unsigned
        )
        self._header_bytes = -(-(8 + len(most_header)) // 64) * 64 - 8
        total = 8 + self._header_bytes
        total += sum(entry.num_bytes for entry in self._entries(planned))
        self._file = NewFile(path)
        try:
            self._file.reserve(total)
            self._file.size = 8 + self._header_bytes
            self._hash_of_front = self._write_front()
        except BaseException:
            self._file.abort()
            raise

    def _entries(self, chunks: Sequence[Chunk]) -> list[layout.Entry]:
        return layout.entries(
            len(self._branches), self._num_tokens, len(self._notes), chunks, self._shape
        )

    def _write_front(self) -> list[bytes]:
        """What comes before the KV; returned, for the digest."""
        front = [
            np.array([getattr(b, name) for b in self._branches], layout.DTYPES[dtype]).tobytes()
            for name, dtype in layout.BRANCH_TENSORS.values()
        ]
        front += [self._of_tokens("logprobs", "F64"), self._of_tokens("tokens", "I32")]
        for data in front:
            self._file.write(data)
        return front

    def _of_tokens(self, name: str, dtype: str) -> bytes:
        parts = [np.asarray(getattr(b, name), layout.DTYPES[dtype]) for b in self._branches]
        return np.concatenate(parts).tobytes()

    def write_kv(self, chunk: Chunk, record: UInt8) -> None:
        """Append the KV of a planned chunk, ``[layer][K, V][token][head][dim]``.

        Raises:
            SavedBranchError: no space left, or another failure of the disk.
        """
        assert record.size == chunk.num_tokens * self._shape.token_bytes, (chunk, record.size)
        record = np.ascontiguousarray(record)
        self._file.write(record)
        self._chunks.append(chunk)
        self._checksums.append(hashlib.sha256(record.data).digest())

    def finish(self) -> None:
        """Write the rest, and let the file appear.

        Raises:
            SavedBranchError: no space left, or another failure of the disk.
        """
        back = [
            np.array(self._chunks, layout.DTYPES["I32"]).reshape(-1, 3).tobytes(),
            b"".join(self._checksums),
            self._of_tokens("sampled", "U8"),
            bytes(branch.closed for branch in self._branches),
            self._notes,
        ]
        for data in back:
            self._file.write(data)
        entries = self._entries(self._chunks)
        raw = self._pad(layout.header(entries, self._metadata, signature=self._unsigned))
        digest = layout.digest(raw, [*self._hash_of_front, *back])
        signature = "" if self._key is None else layout.sign(self._key, digest)
        raw = self._pad(layout.header(entries, self._metadata, digest, signature))
        self._file.write_at(0, len(raw).to_bytes(8, "little") + raw)
        self._file.commit()

    def _pad(self, raw: bytes) -> bytes:
        if len(raw) > layout.MAX_HEADER:
            raise SavedBranchError(
                f"cannot save to {self._file.path}: its header would be {len(raw)} bytes, the most "
                f"is {layout.MAX_HEADER}: save parts of the tree in files of their own"
            )
        return raw.ljust(self._header_bytes)

    def abort(self) -> None:
        """Leave nothing behind. After `finish` it does nothing."""
        self._file.abort()

    def __enter__(self) -> SavedWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abort()


def write(
    path: str | os.PathLike[str],
    branches: Sequence[SavedBranch],
    kv: Sequence[tuple[Chunk, UInt8]],
    *,
    shape: KVShape,
    fingerprint: str,
    computed_under: str = "",
    key: bytes | None = None,
) -> None:
    """Write a file whose KV is all at hand; as `SavedWriter`."""
    options: dict[str, Any] = {"shape": shape, "fingerprint": fingerprint, "key": key}
    options["computed_under"] = computed_under
    with SavedWriter(path, branches, planned=[chunk for chunk, _ in kv], **options) as writer:
        for chunk, record in kv:
            writer.write_kv(chunk, record)
        writer.finish()
