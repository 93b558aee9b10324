"""What a saved branch is made of, and its place in a safetensors file.

A safetensors file is eight bytes (the header's length, little-endian), the header (JSON, padded
with spaces), and the tensors' bytes one after the other without gaps. docs/saved-branches.md
describes the tensors for other readers.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cotrt.errors import InvalidRequestError
from cotrt.plan import KVShape

FORMAT = "cotrt.saved_branch"
VERSION = "1"

# KV lies in chunks of the tokens between two multiples of this; each has its checksum.
CHUNK_TOKENS = 64

# A file beyond these is refused, by the writer before anything is written.
MAX_HEADER = 1 << 24
MAX_CHUNKS = 1 << 17
MAX_BRANCHES = 1 << 17
MAX_TOKENS = 1 << 26
MAX_NOTES = 1 << 24  # bytes of JSON
MAX_DEPTH = 64  # of JSON
MAX_TOKEN_BYTES = 1 << 24
MAX_FINGERPRINT = 1024  # characters

KV_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "int32": "I32"}
DTYPES: dict[str, np.dtype[Any]] = {
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F64": np.dtype("<f8"),
    "I32": np.dtype("<i4"),
    "U8": np.dtype("u1"),
}
ITEM_BYTES = {"U64": 8, "I64": 8, "F64": 8, "I32": 4, "F32": 4, "BF16": 2, "F16": 2, "U8": 1}

# One number a branch, in this order: tensor -> (attribute of SavedBranch, dtype).
BRANCH_TENSORS = {
    "seeds": ("seed", "U64"),
    "epochs": ("epoch", "I64"),
    "fork_counts": ("fork_count", "I64"),
    "fork_numbers": ("fork_number", "I64"),
    "fork_lengths": ("fork_length", "I64"),
    "ended_at": ("ended_at", "I64"),
    "parents": ("parent", "I64"),
    "shared_lengths": ("shared", "I64"),
    "lengths": ("length", "I64"),
    "branch_ids": ("id", "I64"),
}
# One a token, the branches' own tokens one after the other.
TOKEN_TENSORS = {"logprobs": "F64", "tokens": "I32", "sampled": "U8"}
SMALL_TENSORS = {
    **{name: dtype for name, (_, dtype) in BRANCH_TENSORS.items()},
    **TOKEN_TENSORS,
    "kv_chunks": "I32",
    "kv_checksums": "U8",
    "closed": "U8",
    "notes": "U8",
}
CHECKSUM_BYTES = 32  # SHA-256

_NO_DIGEST = NO_SIGNATURE = "0" * 64


@dataclass(frozen=True, slots=True, eq=False)
class SavedBranch:
    """One branch of a file.

    Its first `shared` tokens are those of its parent; it owns the ones after them.

    Attributes:
        tokens: int32, its own token ids.
        logprobs: float64, log-probability of each, NaN where it was given.
        sampled: uint8, 1 where it was sampled.
        parent: index of its parent in the file, -1 for the first.
        shared: tokens that it has from its parent.
        seed, epoch: keys of its draws.
        fork_count: forks ever made of it; fork_number: its own among its parent's.
        fork_length: its parent's length when it was forked.
        ended_at: its length when a generation last ended by end-of-sequence, else -1.
        id: in the process that saved it.
        closed: its handle had been given up; it lived on for its descendants.
        metadata: the program's own.
        grammar: (fields of StructuredOutputs, position) of the last generate that followed one.
    """

    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float64]
    sampled: npt.NDArray[np.uint8]
    parent: int = -1
    shared: int = 0
    seed: int = 0
    epoch: int = 0
    fork_count: int = 0
    fork_number: int = 0
    fork_length: int = 0
    ended_at: int = -1
    id: int = 0
    closed: bool = False
    metadata: dict[str, Any] | None = None
    grammar: tuple[dict[str, Any], int] | None = None

    @property
    def length(self) -> int:
        """All its tokens, those of its ancestors included."""
        return self.shared + len(self.tokens)


class Chunk(NamedTuple):
    """KV of `num_tokens` tokens of a branch's own, from position `start` on."""

    branch: int
    start: int
    num_tokens: int

    @property
    def name(self) -> str:
        return f"kv.{self.branch}.{self.start}"


def chunks_of(branch: int, start: int, stop: int) -> Iterable[Chunk]:
    """Positions `start` to `stop` cut at multiples of CHUNK_TOKENS."""
    while start < stop:
        end = min(stop, start - start % CHUNK_TOKENS + CHUNK_TOKENS)
        yield Chunk(branch, start, end - start)
        start = end


class Entry(NamedTuple):
    """A tensor in the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        count = ITEM_BYTES[self.dtype]
        for size in self.shape:
            count *= size
        return count


def entries(
    num_branches: int, num_tokens: int, notes_bytes: int, chunks: Sequence[Chunk], shape: KVShape
) -> list[Entry]:
    """All tensors of a file in their order, wide items first, so that every one is aligned."""
    found = [Entry(name, dtype, (num_branches,)) for name, (_, dtype) in BRANCH_TENSORS.items()]
    found += [Entry(name, TOKEN_TENSORS[name], (num_tokens,)) for name in ("logprobs", "tokens")]
    found += [
        Entry(
            chunk.name,
            KV_DTYPES[shape.dtype],
            (shape.num_layers, shape.num_kinds, chunk.num_tokens, shape.num_heads, shape.head_dim),
        )
        for chunk in chunks
    ]
    return [
        *found,
        Entry("kv_chunks", "I32", (len(chunks), 3)),
        Entry("kv_checksums", "U8", (len(chunks), CHECKSUM_BYTES)),
        Entry("sampled", "U8", (num_tokens,)),
        Entry("closed", "U8", (num_branches,)),
        Entry("notes", "U8", (notes_bytes,)),
    ]


def header(
    tensors: Sequence[Entry],
    metadata: Mapping[str, str],
    digest: str = _NO_DIGEST,
    signature: str = "",
) -> bytes:
    """The header's JSON; ``__metadata__`` with digest and signature, if there is one."""
    signed = {"signature": signature} if signature else {}
    table: dict[str, Any] = {"__metadata__": {**metadata, "digest": digest, **signed}}
    offset = 0
    for name, dtype, shape in tensors:
        size = Entry(name, dtype, shape).num_bytes
        table[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    return json.dumps(table, separators=(",", ":")).encode()


def digest(raw: bytes, small: Iterable[bytes]) -> str:
    """SHA-256 over a header whose own digest is zeros, and all tensors but the KV in file order.

    KV is vouched for by its checksums, which are among those tensors.
    """
    found = hashlib.sha256(len(raw).to_bytes(8, "little") + raw)
    for data in small:
        found.update(data)
    return found.hexdigest()


def without_digest(raw: bytes, found: str, signature: str = "") -> bytes:
    """A header as it was hashed: zeros in place of the digest and of the signature."""
    for name, value in (("digest", found), ("signature", signature)):
        raw = raw.replace(f'"{name}":"{value}"'.encode(), f'"{name}":"{NO_SIGNATURE}"'.encode(), 1)
    return raw


def sign(key: bytes, found: str) -> str:
    """HMAC-SHA256 of a digest, and so of all that it covers, in hexadecimal."""
    return hmac.new(key, f"{FORMAT} {found}".encode(), "sha256").hexdigest()


def metadata(
    branches: int,
    tokens: int,
    notes: int,
    fingerprint: str,
    shape: KVShape,
    computed_under: str = "",
) -> dict[str, str]:
    """What stands in ``__metadata__`` beside the digest.

    Raises:
        InvalidRequestError: a fingerprint or conditions that are too long.
    """
    for name, text in (("fingerprint", fingerprint), ("computed_under", computed_under)):
        if len(text) > MAX_FINGERPRINT:
            raise InvalidRequestError(
                f"the model's {name} has {len(text)} characters, a saved branch holds "
                f"{MAX_FINGERPRINT}: make it a hash"
            )
    optional = {"computed_under": computed_under} if computed_under else {}
    return {
        **optional,
        "format": FORMAT,
        "version": VERSION,
        "fingerprint": fingerprint,
        "num_layers": str(shape.num_layers),
        "num_kinds": str(shape.num_kinds),
        "num_heads": str(shape.num_heads),
        "head_dim": str(shape.head_dim),
        "kv_dtype": shape.dtype,
        "chunk_tokens": str(CHUNK_TOKENS),
        "num_branches": str(branches),
        "num_tokens": str(tokens),
        "notes_bytes": str(notes),
    }


def notes_of(branches: Sequence[SavedBranch]) -> bytes:
    """Metadata and grammars as JSON: one item a branch, null where there is nothing.

    Raises:
        InvalidRequestError: metadata that JSON cannot hold as it is.
    """
    notes: list[dict[str, Any] | None] = []
    for branch in branches:
        note: dict[str, Any] = {}
        if branch.metadata:
            check_json(branch.metadata, f"metadata of branch {branch.id}")
            note["metadata"] = branch.metadata
        if branch.grammar is not None:
            note["grammar"] = {"structured_outputs": branch.grammar[0], "start": branch.grammar[1]}
            check_json(note["grammar"], f"structured outputs of branch {branch.id}")
        notes.append(note or None)
    text = json.dumps(notes, separators=(",", ":")).encode()
    if len(text) > MAX_NOTES:
        raise InvalidRequestError(
            f"metadata of {len(branches)} branches is {len(text)} bytes of JSON, the most is "
            f"{MAX_NOTES}: keep large data elsewhere, and its name in b.metadata"
        )
    return text


def check_json(value: Any, what: str) -> None:
    """`value` comes back from JSON as it is.

    Raises:
        InvalidRequestError: it would not; the message says where.
    """
    stack: list[tuple[Any, str, int]] = [(value, what, 1)]
    while stack:
        each, where, depth = stack.pop()
        if depth > MAX_DEPTH:
            raise InvalidRequestError(
                f"{what} is nested more than {MAX_DEPTH} deep: flatten it, or take it out of "
                "b.metadata before saving"
            )
        if type(each) is dict:
            for key, inner in each.items():
                if type(key) is not str:
                    raise _not_json(f"the key {key!r:.40} of {where}", key)
                stack.append((inner, f"{where}[{key!r:.40}]", depth + 1))
        elif type(each) is list:
            stack += [(inner, f"{where}[{i}]", depth + 1) for i, inner in enumerate(each)]
        elif not (each is None or type(each) in (str, bool, int)) and not (
            type(each) is float and each - each == 0
        ):
            raise _not_json(where, each)
        elif type(each) is int and abs(each) >= 1 << 4096:
            raise _not_json(where, "an int of more than 4,096 bits")


def _not_json(where: str, value: Any) -> InvalidRequestError:
    kind = f"{value!r}" if type(value) in (float, str) else f"of type {type(value).__name__}"
    return InvalidRequestError(
        f"{where} is {kind}, which JSON cannot hold as it is: save what is made of dicts with str "
        "keys, lists, str, int, finite float, bool and None"
    )
