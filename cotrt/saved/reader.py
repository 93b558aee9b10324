"""Reads a saved branch and trusts nothing in it: every byte is checked before it is used.

Files are read by `pread` and never mapped: one that is cut while it is open gives an error then,
where a map would end the process.
"""

from __future__ import annotations

import bisect
import hashlib
import hmac
import io
import json
import os
import stat
import threading
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from cotrt.errors import InvalidRequestError, SavedBranchError
from cotrt.plan import KVShape, UInt8
from cotrt.saved import layout
from cotrt.saved.layout import Chunk, Entry, SavedBranch

_PIECE = 1 << 22
_LARGEST = 1 << 31


class SavedFile:
    """A saved branch that was checked in full, open for reading its KV.

    Safe to use from several threads. It is open until `close`.

    Args:
        path: the file.

    Attributes:
        path: absolute.
        branches: parents before their children.
        shape: layout of the KV; fingerprint: of the model that it was saved from.
        computed_under: what else decided the KV's bits; empty where they were not promised.
        chunks: KV that is in the file.

    Raises:
        SavedBranchError: it cannot be read, is damaged, or is no saved branch of this version; the
            message names what is wrong.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(path)
        self._file = self._open()
        self._lock = threading.Lock()
        self._last: tuple[int, UInt8] | None = None  # the chunk read last
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    # ---- KV -----------------------------------------------------------------------------------

    @property
    def chunks(self) -> Sequence[Chunk]:
        return self._chunks

    def is_signed_by(self, key: bytes) -> bool:
        """Whether somebody who has the key wrote all that is in the file."""
        return hmac.compare_digest(layout.sign(key, self._digest), self._signature)

    def kv_stop(self, branch: int, start: int, limit: int) -> int:
        """The first position from `start` on whose KV is not in the file, at most `limit`.

        Args:
            branch: index of the branch that owns `start`.
        """
        starts, first = self._starts[branch], self._first_chunk[branch]
        at = bisect.bisect_right(starts, start) - 1
        while 0 <= at < len(starts) and start < limit:
            chunk = self._chunks[first + at]
            if not chunk.start <= start < chunk.start + chunk.num_tokens:
                break
            start = chunk.start + chunk.num_tokens
            at += 1
        return min(start, limit)

    def read_kv(self, branch: int, start: int, stop: int) -> UInt8:
        """KV of positions `start` to `stop`, all of them `branch`'s own, checked again.

        Returns:
            uint8, one record ``[layer][K, V][token][head][dim]``.

        Raises:
            SavedBranchError: it is not in the file, or the file was changed since it was opened.
        """
        parts: list[UInt8] = []
        at = bisect.bisect_right(self._starts[branch], start) - 1
        while start < stop:
            if not 0 <= at < len(self._starts[branch]):
                self._refuse(f"there is no KV of position {start} of branch {branch}")
            index = self._first_chunk[branch] + at
            chunk = self._chunks[index]
            if not chunk.start <= start < chunk.start + chunk.num_tokens:
                self._refuse(f"there is no KV of position {start} of branch {branch}")
            end = min(stop, chunk.start + chunk.num_tokens)
            record = self._read_chunk(index)
            if end - start < chunk.num_tokens:
                record = self.shape.cut(record, start - chunk.start, end - chunk.start)
            parts.append(record)
            start, at = end, at + 1
        return parts[0] if len(parts) == 1 else self.shape.join(parts)

    def _read_chunk(self, index: int) -> UInt8:
        with self._lock:  # blocks are asked for in order, several of them in one chunk
            if self._last is None or self._last[0] != index:
                self._last = (index, self._read_checked(index))
            return self._last[1]

    def _read_checked(self, index: int) -> UInt8:
        chunk = self._chunks[index]
        data = self._pread(self._offsets[index], chunk.num_tokens * self.shape.token_bytes)
        if hashlib.sha256(data).digest() != self._checksums[index].tobytes():
            self._refuse(f"KV of {self._where(chunk)} does not agree with its checksum")
        record: UInt8 = np.frombuffer(data, np.uint8)
        return record

    def close(self) -> None:
        """Give up the file; what is read later fails."""
        self._file.close()

    # ---- opening and checking -----------------------------------------------------------------

    def _refuse(self, what: str) -> NoReturn:
        if what.startswith(("cut", "damaged")):
            what += "; copy it again from where it is whole, or save it anew"
        raise SavedBranchError(f"{self.path}: {what}")

    def _open(self) -> io.FileIO:
        flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
        try:
            kind = os.stat(self.path).st_mode
            if stat.S_ISREG(kind):
                file = io.FileIO(os.open(self.path, flags))
                status = os.fstat(file.fileno())
                if stat.S_ISREG(status.st_mode):
                    self._size = status.st_size
                    return file
                file.close()
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise SavedBranchError(f"cannot load {self.path}: {why}") from error
        what = "a folder" if stat.S_ISDIR(kind) else "no regular file"
        raise SavedBranchError(f"cannot load {self.path}: it is {what}")

    def _pread(self, offset: int, count: int) -> bytes:
        """Exactly `count` bytes at `offset`."""
        parts = []
        try:
            while count:
                part = os.pread(self._file.fileno(), count, offset)
                if not part:
                    self._refuse(f"it was cut to {offset} bytes while it was open")
                parts.append(part)
                offset, count = offset + len(part), count - len(part)
        except OSError as error:
            self._refuse(f"reading {count} bytes at {offset} failed: {error.strerror}")
        except ValueError:
            self._refuse("it is closed")
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _read(self) -> None:
        raw = self._read_header()
        table = self._parse(raw)
        metadata = self._check_metadata(table.pop("__metadata__", None))
        entries, ends = self._check_entries(table, 8 + len(raw))
        small = {e.name: e for e in entries if not e.name.startswith("kv.")}
        if set(small) != set(layout.SMALL_TENSORS):
            wrong = sorted(set(small) ^ set(layout.SMALL_TENSORS))[0]
            self._refuse(f"tensor {wrong!r:.60} is missing, or does not belong here")
        data = self._read_small(small, ends)
        digest = metadata["digest"]
        ordered = [data[entry.name] for entry in entries if entry.name in small]
        signature = metadata.get("signature", "")
        if layout.digest(layout.without_digest(raw, digest, signature), ordered) != digest:
            self._refuse("damaged: header and tokens do not agree with their checksum")
        self._take(metadata, data)
        self._check_layout(entries, ends, len(data["notes"]))
        self._check_kv()

    def _read_header(self) -> bytes:
        if self._size < 8:
            self._refuse(f"cut: {self._size} bytes hold no safetensors header")
        count = int.from_bytes(self._pread(0, 8), "little")
        if not 2 <= count <= layout.MAX_HEADER:
            self._refuse(
                f"no saved branch: it begins with a header length of {count}, not one from 2 to "
                f"{layout.MAX_HEADER}"
            )
        if 8 + count > self._size:
            self._refuse(f"cut: {self._size} bytes, the header alone is {8 + count}")
        return self._pread(8, count)

    def _parse(self, raw: bytes) -> dict[str, Any]:
        most = layout.MAX_CHUNKS + len(layout.SMALL_TENSORS)
        if raw.count(b"{") + raw.count(b"[") > 3 * most + 2:
            self._refuse(f"its header describes more than {most} tensors")
        table = self._json(raw, "its header")
        if type(table) is not dict:
            self._refuse(f"its header is a JSON {type(table).__name__}, not an object")
        return table

    def _json(self, raw: bytes, what: str) -> Any:
        def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
            found = dict(items)
            if len(found) != len(items):
                raise ValueError("a name stands in it twice")
            return found

        try:
            return json.loads(raw.decode(), object_pairs_hook=pairs)
        except (ValueError, RecursionError, MemoryError) as error:
            self._refuse(f"{what} is not JSON as it should be: {str(error)[:100]}")

    def _check_metadata(self, found: Any) -> dict[str, str]:
        if type(found) is not dict or found.get("format") != layout.FORMAT:
            self._refuse(f"a safetensors file, but no saved branch: no format {layout.FORMAT!r}")
        if found.get("version") != layout.VERSION:
            self._refuse(
                f"a saved branch of format version {found.get('version')!r:.40}; this cotrt reads "
                f"version {layout.VERSION!r}: load it with the version that wrote it"
            )
        wanted = layout.metadata(0, 0, 0, "", KVShape(1, 1, 1, 1, "int32"))
        optional = {"computed_under", "signature"}
        if set(found) - optional != {*wanted, "digest"}:
            wrong = sorted((set(found) - optional) ^ {*wanted, "digest"})[0]
            self._refuse(f"metadata {wrong!r:.60} is missing, or does not belong here")
        for name, value in found.items():
            if type(value) is not str or len(value) > layout.MAX_FINGERPRINT:
                self._refuse(
                    f"metadata {name!r:.60} is not a string of at most "
                    f"{layout.MAX_FINGERPRINT} characters"
                )
        return found

    def _check_entries(
        self, table: dict[str, Any], data_start: int
    ) -> tuple[list[Entry], dict[str, tuple[int, int]]]:
        """Tensors in the order of their bytes, and where each begins and ends in the file."""
        found: list[tuple[int, int, Entry]] = []
        for name, entry in table.items():
            where = f"tensor {name!r:.60}"
            if type(entry) is not dict or set(entry) != {"dtype", "shape", "data_offsets"}:
                self._refuse(f"{where} is not described by dtype, shape and data_offsets")
            dtype, shape, span = entry["dtype"], entry["shape"], entry["data_offsets"]
            if type(dtype) is not str or dtype not in layout.ITEM_BYTES:
                self._refuse(f"{where} has dtype {dtype!r:.40}")
            for numbers, most in ((shape, 5), (span, 2)):
                if (
                    type(numbers) is not list
                    or len(numbers) > most
                    or not all(type(n) is int and 0 <= n <= 1 << 60 for n in numbers)
                ):
                    self._refuse(f"{where} has no proper shape and data_offsets")
            if len(span) != 2 or span[1] - span[0] != Entry(name, dtype, tuple(shape)).num_bytes:
                self._refuse(f"{where} is {span!r:.60}, which is not the size of its shape")
            found.append((span[0], span[1], Entry(name, dtype, tuple(shape))))
        found.sort(key=lambda each: each[:2])
        ends, at = {}, 0
        for begin, end, tensor in found:
            if begin != at:
                self._refuse(f"tensor {tensor.name!r:.60} begins at {begin}, not at {at}")
            ends[tensor.name] = (data_start + begin, data_start + end)
            at = end
        if data_start + at != self._size:
            kind = "cut" if self._size < data_start + at else "longer than it should be"
            self._refuse(f"{kind}: {self._size} bytes, {data_start + at} expected")
        return [tensor for _, _, tensor in found], ends

    def _read_small(
        self, small: dict[str, Entry], ends: dict[str, tuple[int, int]]
    ) -> dict[str, bytes]:
        limits = {
            **dict.fromkeys(layout.BRANCH_TENSORS, layout.MAX_BRANCHES),
            **dict.fromkeys(layout.TOKEN_TENSORS, layout.MAX_TOKENS),
            "kv_chunks": layout.MAX_CHUNKS * 3,
            "kv_checksums": layout.MAX_CHUNKS * layout.CHECKSUM_BYTES,
            "closed": layout.MAX_BRANCHES,
            "notes": layout.MAX_NOTES,
        }
        for name, entry in small.items():
            if entry.dtype != layout.SMALL_TENSORS[name]:
                self._refuse(f"tensor {name!r} has dtype {entry.dtype}")
            if entry.num_bytes > limits[name] * layout.ITEM_BYTES[entry.dtype]:
                self._refuse(f"tensor {name!r} is larger than a saved branch's can be")
        return {name: self._pread(ends[name][0], ends[name][1] - ends[name][0]) for name in small}

    def _take(self, metadata: dict[str, str], data: dict[str, bytes]) -> None:
        """Make branches and tables of the small tensors, each value checked."""

        def number(name: str, low: int, high: int) -> int:
            text = metadata[name]
            if not text.isascii() or not text.isdecimal() or not low <= int(text) <= high:
                self._refuse(f"metadata {name!r} is {text!r:.40}, not a number up to {high}")
            return int(text)

        if metadata["kv_dtype"] not in layout.KV_DTYPES:
            self._refuse(f"metadata 'kv_dtype' is {metadata['kv_dtype']!r:.40}")
        self.shape = KVShape(
            number("num_layers", 1, 1 << 16),
            number("num_kinds", 1, 2),
            number("num_heads", 1, 1 << 16),
            number("head_dim", 1, 1 << 16),
            metadata["kv_dtype"],
        )
        if self.shape.token_bytes > layout.MAX_TOKEN_BYTES:
            self._refuse(f"KV of {self.shape.token_bytes} bytes a token")
        number("chunk_tokens", layout.CHUNK_TOKENS, layout.CHUNK_TOKENS)
        num_branches = number("num_branches", 1, layout.MAX_BRANCHES)
        num_tokens = number("num_tokens", 0, layout.MAX_TOKENS)
        number("notes_bytes", len(data["notes"]), len(data["notes"]))
        self.fingerprint = metadata["fingerprint"]
        self.computed_under = metadata.get("computed_under", "")
        self._digest, self._signature = metadata["digest"], metadata.get("signature", "")
        arrays: dict[str, npt.NDArray[Any]] = {
            name: np.frombuffer(data[name], layout.DTYPES[dtype])
            for name, dtype in layout.SMALL_TENSORS.items()
        }
        for name in (*layout.BRANCH_TENSORS, "closed"):
            if len(arrays[name]) != num_branches:
                self._refuse(f"{len(arrays[name])} {name} for {num_branches} branches")
        for name in layout.TOKEN_TENSORS:
            if len(arrays[name]) != num_tokens:
                self._refuse(f"{len(arrays[name])} {name} for {num_tokens} tokens")
        self._check_tokens(arrays)
        self.branches = self._make_branches(arrays, data["notes"], num_tokens)
        self._take_chunks(arrays["kv_chunks"], arrays["kv_checksums"])

    def _check_tokens(self, arrays: dict[str, npt.NDArray[Any]]) -> None:
        if (arrays["tokens"] < 0).any():
            self._refuse("a token id below 0")
        if (arrays["sampled"] > 1).any() or (arrays["closed"] > 1).any():
            self._refuse("a flag that is neither 0 nor 1")
        values = arrays["logprobs"]
        if not np.isnan(values[arrays["sampled"] == 0]).all() or (values == np.inf).any():
            self._refuse("a log-probability where there is none, or an infinite one")

    def _make_branches(
        self, arrays: dict[str, npt.NDArray[Any]], text: bytes, num_tokens: int
    ) -> tuple[SavedBranch, ...]:
        notes = self._json(text, "its notes")
        if type(notes) is not list or len(notes) != len(arrays["seeds"]):
            self._refuse("its notes are not a list with one item a branch")
        columns = {name: arrays[name].tolist() for name in layout.BRANCH_TENSORS}
        made: list[SavedBranch] = []
        at = 0
        for i, note in enumerate(notes):
            row = {name: columns[name][i] for name in columns}
            parent, shared, length = row["parents"], row["shared_lengths"], row["lengths"]
            above = -1 if i == 0 else made[parent].length if 0 <= parent < i else None
            if above is None or (i == 0 and parent != -1):
                self._refuse(f"branch {i} has branch {parent} for a parent")
            if not max(0, shared) == shared <= max(above, 0) or not shared <= length < _LARGEST:
                self._refuse(f"branch {i} shares {shared} tokens and has {length}")
            for name in ("epochs", "fork_counts", "fork_numbers", "branch_ids"):
                if row[name] < 0:
                    self._refuse(f"branch {i} has {row[name]} in {name}")
            if not 0 <= row["fork_lengths"] < _LARGEST or not -1 <= row["ended_at"] < _LARGEST:
                self._refuse(f"branch {i} has a fork length or end that cannot be")
            stop = at + length - shared
            if stop > num_tokens:
                self._refuse(f"branch {i} owns tokens up to {stop}, there are {num_tokens}")
            values = {field: row[name] for name, (field, _) in layout.BRANCH_TENSORS.items()}
            del values["length"]
            made.append(
                SavedBranch(
                    tokens=arrays["tokens"][at:stop],
                    logprobs=arrays["logprobs"][at:stop],
                    sampled=arrays["sampled"][at:stop],
                    closed=bool(arrays["closed"][i]),
                    **values,
                    **self._check_note(note, i, length),
                )
            )
            at = stop
        if at != num_tokens:
            self._refuse(f"{num_tokens} tokens, of which branches own {at}")
        if made[0].closed:
            self._refuse("its first branch is a closed one")
        return tuple(made)

    def _check_note(self, note: Any, branch: int, length: int) -> dict[str, Any]:
        if note is None:
            return {}
        if type(note) is not dict or not set(note) <= {"metadata", "grammar"}:
            self._refuse(f"the notes of branch {branch} are not what they should be")
        try:
            layout.check_json(note.get("metadata"), f"metadata of branch {branch}")
            layout.check_json(note.get("grammar"), f"grammar of branch {branch}")
        except InvalidRequestError as error:
            self._refuse(str(error))
        found: dict[str, Any] = {}
        if "metadata" in note:
            if type(note["metadata"]) is not dict:
                self._refuse(f"the metadata of branch {branch} is not an object")
            found["metadata"] = note["metadata"]
        grammar = note.get("grammar")
        if grammar is not None:
            if type(grammar) is not dict or set(grammar) != {"structured_outputs", "start"}:
                self._refuse(f"the grammar of branch {branch} is not what it should be")
            wanted, start = grammar["structured_outputs"], grammar["start"]
            if type(wanted) is not dict or type(start) is not int or not 0 <= start <= length:
                self._refuse(f"the grammar of branch {branch} is not what it should be")
            found["grammar"] = (wanted, start)
        return found

    def _take_chunks(self, table: npt.NDArray[Any], checksums: npt.NDArray[Any]) -> None:
        if len(table) % 3 or len(checksums) != len(table) // 3 * layout.CHECKSUM_BYTES:
            self._refuse("the table of KV chunks and their checksums do not go together")
        self._checksums = checksums.reshape(-1, layout.CHECKSUM_BYTES)
        self._chunks = [Chunk(*row) for row in table.reshape(-1, 3).tolist()]
        self._starts: list[list[int]] = [[] for _ in self.branches]
        self._first_chunk = [0] * len(self.branches)
        last = (-1, 0)
        for index, chunk in enumerate(self._chunks):
            number, start, count = chunk
            stop = start + count
            size = layout.CHUNK_TOKENS
            if (
                not 0 <= number < len(self.branches)
                or count < 1
                or not self.branches[number].shared <= start <= stop <= self.branches[number].length
                or start // size != (stop - 1) // size
                or (number, start) < last
            ):
                self._refuse(f"KV chunk {index}, {self._where(chunk)}, cannot be")
            if not self._starts[number]:
                self._first_chunk[number] = index
            self._starts[number].append(start)
            last = (number, stop)

    def _where(self, chunk: Chunk) -> str:
        return (
            f"positions {chunk.start} to {chunk.start + chunk.num_tokens} of branch {chunk.branch}"
        )

    def _check_layout(
        self, entries: list[Entry], ends: dict[str, tuple[int, int]], notes_bytes: int
    ) -> None:
        """The header says of the tensors what the tables say."""
        num_tokens = sum(len(branch.tokens) for branch in self.branches)
        expected = layout.entries(
            len(self.branches), num_tokens, notes_bytes, self._chunks, self.shape
        )
        # An empty tensor may stand on either side of its neighbour, for they begin alike.
        if {e.name: e for e in entries} != {e.name: e for e in expected}:
            self._refuse("the tensors in its header are not those that its tables tell of")
        self._offsets = [ends[chunk.name][0] for chunk in self._chunks]

    def _check_kv(self) -> None:
        for index, chunk in enumerate(self._chunks):
            found = hashlib.sha256()
            at = self._offsets[index]
            end = at + chunk.num_tokens * self.shape.token_bytes
            while at < end:
                piece = self._pread(at, min(_PIECE, end - at))
                found.update(piece)
                at += len(piece)
            if found.digest() != self._checksums[index].tobytes():
                self._refuse(f"damaged: KV of {self._where(chunk)} differs from its checksum")
