"""The file of a saved branch: what goes in comes out, and nothing else ever does."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from saved_trees import SHAPE, fields_of, random_kv, random_tree

from cotrt.errors import InvalidRequestError, SavedBranchError
from cotrt.plan import KVShape
from cotrt.saved import layout
from cotrt.saved.layout import Chunk, SavedBranch, chunks_of
from cotrt.saved.reader import SavedFile
from cotrt.saved.writer import SavedWriter, write

seeds = st.integers(0, 1 << 32)


def _write(path: Path, seed: int, shape: KVShape = SHAPE, **options: Any) -> Any:
    branches = random_tree(seed, **options)
    kv = random_kv(seed, branches, shape)
    write(path, branches, kv, shape=shape, fingerprint="a model")
    return branches, kv


def _check(file: SavedFile, branches: list[SavedBranch], kv: list[Any]) -> None:
    assert list(map(fields_of, file.branches)) == list(map(fields_of, branches))
    assert list(file.chunks) == [chunk for chunk, _ in kv]
    for chunk, record in kv:
        stop = chunk.start + chunk.num_tokens
        assert np.array_equal(file.read_kv(chunk.branch, chunk.start, stop), record)


@given(
    seed=seeds,
    shape=st.sampled_from([SHAPE, KVShape(1, 1, 1, 1, "int32"), KVShape(3, 2, 3, 5, "float32")]),
)
@settings(max_examples=60, deadline=None)
def test_what_was_written_is_read(tmp_path_factory: Any, seed: int, shape: KVShape) -> None:
    path = tmp_path_factory.mktemp("trees") / "branch.safetensors"
    branches, kv = _write(path, seed, shape)
    file = SavedFile(path)
    _check(file, branches, kv)
    assert (file.fingerprint, file.shape) == ("a model", shape)


def test_conditions_stand_in_the_file_where_bits_were_promised(tmp_path: Path) -> None:
    """And a file without them, as all others are, has the keys that it always had."""
    branch = SavedBranch(*_tokens(3))
    plain = {"shape": SHAPE, "fingerprint": "a model"}
    write(tmp_path / "b", [branch], [], **plain, computed_under="cotrt 7, here")
    assert SavedFile(tmp_path / "b").computed_under == "cotrt 7, here"
    write(tmp_path / "c", [branch], [], **plain)
    assert SavedFile(tmp_path / "c").computed_under == ""
    assert b"computed_under" not in (tmp_path / "c").read_bytes()
    with pytest.raises(InvalidRequestError, match="computed_under has 2000 characters"):
        write(tmp_path / "d", [branch], [], **plain, computed_under="x" * 2000)


def test_parts_of_chunks_and_runs_of_them(tmp_path: Path) -> None:
    branch = SavedBranch(*_tokens(300))
    rng = np.random.default_rng(0)
    whole = rng.integers(0, 256, 300 * SHAPE.token_bytes, dtype=np.uint8)
    chunks = [c for c in chunks_of(0, 0, 300) if c.start != 128]
    kv = [(c, SHAPE.cut(whole, c.start, c.start + c.num_tokens)) for c in chunks]
    write(tmp_path / "b", [branch], kv, shape=SHAPE, fingerprint="")
    file = SavedFile(tmp_path / "b")
    for start, stop in ((0, 1), (0, 128), (63, 65), (70, 71), (192, 300), (250, 290)):
        assert np.array_equal(file.read_kv(0, start, stop), SHAPE.cut(whole, start, stop))
    assert [file.kv_stop(0, at, 300) for at in (0, 64, 127, 128, 191, 192, 299, 300)] == [
        *(128, 128, 128, 128, 191, 300, 300, 300)
    ]
    for start, stop in ((100, 129), (128, 130), (299, 301)):
        with pytest.raises(SavedBranchError, match="there is no KV of position"):
            file.read_kv(0, start, stop)


def _tokens(count: int) -> Any:
    return (
        np.arange(count, dtype=np.int32),
        np.full(count, np.nan),
        np.zeros(count, np.uint8),
    )


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sample") / "branch.safetensors"
    branches, kv = _write(path, 7, branches=4)
    assert kv
    assert len(branches) > 1
    return path


def test_every_flipped_bit_is_found(sample: Path, tmp_path: Path) -> None:
    """Every seventh byte of the header, its first and last, and 700 more all over the file."""
    good = sample.read_bytes()
    pick = random.Random(1)
    header = 8 + int.from_bytes(good[:8], "little")
    places = set(range(0, header, 7)) | set(range(8)) | set(range(header - 8, header + 8))
    places |= {pick.randrange(len(good)) for _ in range(700)}
    bad = tmp_path / "bad"
    for place in sorted(places):
        data = bytearray(good)
        data[place] ^= 1 << pick.randrange(8)
        bad.write_bytes(data)
        with pytest.raises(SavedBranchError, match=str(bad)):
            SavedFile(bad)


def test_every_cut_is_found(sample: Path, tmp_path: Path) -> None:
    good = sample.read_bytes()
    pick = random.Random(2)
    bad = tmp_path / "bad"
    for length in {0, 1, 7, 8, 9, len(good) - 1, *(pick.randrange(len(good)) for _ in range(200))}:
        bad.write_bytes(good[:length])
        with pytest.raises(SavedBranchError):
            SavedFile(bad)
    bad.write_bytes(good + b"\0")
    with pytest.raises(SavedBranchError, match="longer than it should be"):
        SavedFile(bad)


@given(seed=seeds, data=st.data())
@settings(max_examples=80, deadline=None)
def test_random_damage_is_found(sample: Path, tmp_path_factory: Any, seed: int, data: Any) -> None:
    """Pieces overwritten, moved, doubled or left out: an error, or the very same bytes."""
    good = bytearray(sample.read_bytes())
    bad = bytearray(good)
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(bad) - 1))
        stop = data.draw(st.integers(start, min(len(bad), start + 500)))
        kind = data.draw(st.sampled_from(["zeros", "noise", "out", "twice", "elsewhere"]))
        piece = bytes(bad[start:stop])
        if kind == "zeros":
            bad[start:stop] = bytes(len(piece))
        elif kind == "noise":
            bad[start:stop] = random.Random(seed).randbytes(len(piece))
        elif kind == "out":
            del bad[start:stop]
        elif kind == "twice":
            bad[start:start] = piece
        else:
            at = data.draw(st.integers(0, max(0, len(bad) - len(piece))))
            bad[at : at + len(piece)] = piece
        if not bad:
            break
    path = tmp_path_factory.mktemp("damage") / "b"
    path.write_bytes(bad)
    if bad == good:
        SavedFile(path)
    else:
        with pytest.raises(SavedBranchError):
            SavedFile(path)


def test_a_change_after_the_load_is_found(sample: Path, tmp_path: Path) -> None:
    path = tmp_path / "b"
    path.write_bytes(sample.read_bytes())
    file = SavedFile(path)
    chunks = list(file.chunks)
    first, last = chunks[0], chunks[-1]
    at = file._offsets[0]
    with open(path, "r+b") as out:
        out.seek(at)
        byte = out.read(1)
        out.seek(at)
        out.write(bytes([byte[0] ^ 4]))
    with pytest.raises(SavedBranchError, match="does not agree with its checksum"):
        file.read_kv(first.branch, first.start, first.start + 1)
    os.truncate(path, file._offsets[-1] + 1)
    with pytest.raises(SavedBranchError, match="cut to"):
        file.read_kv(last.branch, last.start, last.start + 1)
    file.close()
    with pytest.raises(SavedBranchError):
        file.read_kv(last.branch, last.start, last.start + 1)


# ---- hostile files -------------------------------------------------------------------------------


def _forge(path: Path, change: Callable[[dict[str, Any], dict[str, bytearray]], None]) -> None:
    """Write a file that was changed on purpose, with every checksum made good again."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    table = json.loads(raw[8:start])
    data = {
        name: bytearray(raw[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]])
        for name, entry in table.items()
        if name != "__metadata__"
    }
    change(table, data)
    offset = 0
    for name, part in data.items():
        if name in table:
            table[name]["data_offsets"] = [offset, offset + len(part)]
            offset += len(part)
    table["__metadata__"]["digest"] = "0" * 64
    head = json.dumps(table, separators=(",", ":")).encode()
    small = [bytes(part) for name, part in data.items() if not name.startswith("kv.")]
    table["__metadata__"]["digest"] = layout.digest(head, small)
    head = json.dumps(table, separators=(",", ":")).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + b"".join(data.values()))


def _number(name: str, index: int, value: int) -> Callable[..., None]:
    def change(table: Any, data: Any) -> None:
        array = np.frombuffer(data[name], layout.DTYPES[layout.SMALL_TENSORS[name]])
        array[index] = value

    return change


def _meta(name: str, value: Any) -> Callable[..., None]:
    def change(table: Any, data: Any) -> None:
        if value is None:
            del table["__metadata__"][name]
        else:
            table["__metadata__"][name] = value

    return change


def _notes(text: str) -> Callable[..., None]:
    def change(table: Any, data: Any) -> None:
        data["notes"][:] = text.encode()
        table["notes"]["shape"] = [len(text.encode())]
        table["__metadata__"]["notes_bytes"] = str(len(text.encode()))

    return change


def _rename(table: Any, data: Any) -> None:
    name = next(name for name in table if name.startswith("kv."))
    table["kv.9.9"], data["kv.9.9"] = table.pop(name), data.pop(name)


def _surplus(table: Any, data: Any) -> None:
    table["payload"] = {"dtype": "U8", "shape": [4], "data_offsets": [0, 0]}
    data["payload"] = bytearray(b"evil")


def _short_sum(table: Any, data: Any) -> None:
    data["kv_checksums"][:32] = bytes(32)


HOSTILE = {
    "unchanged": (lambda table, data: None, None),
    "a parent after its child": (_number("parents", 1, 3), "branch 1 has branch 3 for a parent"),
    "a parent that is itself": (_number("parents", 1, 1), "branch 1 has branch 1 for a parent"),
    "a second root": (_number("parents", 1, -1), "branch 1 has branch -1 for a parent"),
    "no root": (_number("parents", 0, 0), "branch 0 has branch 0 for a parent"),
    "tokens of nobody": (_number("lengths", 1, 1), "branch 1|of which branches own"),
    "a huge length": (_number("lengths", 0, 1 << 62), "branch 0 shares 0 tokens and has"),
    "a negative length": (_number("lengths", 0, -5), "branch 0"),
    "shared beyond the parent": (_number("shared_lengths", 1, 1 << 40), "branch 1 shares"),
    "shared below 0": (_number("shared_lengths", 1, -1), "branch 1 shares"),
    "a negative epoch": (_number("epochs", 0, -1), "branch 0 has -1 in epochs"),
    "a negative count": (_number("fork_counts", 0, -1), "branch 0 has -1 in fork_counts"),
    "an end that cannot be": (_number("ended_at", 0, -2), "branch 0 has a fork length or end"),
    "a negative token": (_number("tokens", 0, -7), "a token id below 0"),
    "a third truth": (_number("sampled", 0, 2), "a flag"),
    "a closed first branch": (_number("closed", 0, 1), "its first branch is a closed one"),
    "another format": (_meta("format", "pt"), "no saved branch"),
    "another version": (_meta("version", "2"), "version '2'; this cotrt reads version '1'"),
    "no version": (_meta("version", None), "version None"),
    "no layers": (_meta("num_layers", "0"), "'num_layers' is '0'"),
    "huge heads": (_meta("num_heads", "9" * 30), "'num_heads' is"),
    "a huge token": (_meta("head_dim", "65536"), "KV of|tensors in its header"),
    "letters for a number": (_meta("num_layers", "two"), "'num_layers' is 'two'"),
    "an odd dtype": (_meta("kv_dtype", "object"), "'kv_dtype' is 'object'"),
    "other layers": (_meta("num_layers", "3"), "the tensors in its header"),
    "other chunks": (_meta("chunk_tokens", "128"), "'chunk_tokens'"),
    "a surplus word": (_meta("more", "x"), "metadata 'more'"),
    "a number for a word": (_meta("fingerprint", 7), "metadata 'fingerprint' is not a string"),
    "a long fingerprint": (_meta("fingerprint", "x" * 5000), "'fingerprint' is not a string"),
    "a number for conditions": (_meta("computed_under", 7), "'computed_under' is not a string"),
    "long conditions": (_meta("computed_under", "x" * 5000), "'computed_under' is not a string"),
    "notes that are no JSON": (_notes("[nul]"), "its notes is not JSON"),
    "notes of too few": (_notes("[null]"), "not a list with one item a branch"),
    "notes that are deep": (_notes("[" * 100_000), "its notes is not JSON"),
    "an infinite note": (
        _notes('[{"metadata":{"a":Infinity}}, null, null, null]'),
        "not a list|JSON cannot hold",
    ),
    "a renamed chunk": (_rename, "the tensors in its header"),
    "a surplus tensor": (_surplus, "tensor 'payload'"),
    "a wrong checksum": (_short_sum, "differs from its checksum"),
    "a chunk of nobody": (_number("kv_chunks", 0, 77), "KV chunk 0, .* cannot be"),
    "a chunk elsewhere": (_number("kv_chunks", 1, 1 << 30), "KV chunk 0, .* cannot be"),
    "an empty chunk": (_number("kv_chunks", 2, 0), "KV chunk 0, .* cannot be"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_forged_files(sample: Path, tmp_path: Path, name: str) -> None:
    """Checksums are no secret: whoever forges a file makes them good, and it is refused even so."""
    path = tmp_path / "forged"
    path.write_bytes(sample.read_bytes())
    change, message = HOSTILE[name]
    _forge(path, change)
    if message is None:
        SavedFile(path)
        return
    with pytest.raises(SavedBranchError, match=message):
        SavedFile(path)


def _raw(header: bytes, body: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + body


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "cut: 0 bytes"),
        (b"PK\x03\x04" + bytes(100), "no saved branch: it begins with a header length of"),
        (b"\x80\x04\x95" + bytes(100), "cut: 103 bytes"),
        (
            b"\xff" * 8 + b"{}",
            "no saved branch: it begins with a header length of 18446744073709551615",
        ),
        ((1 << 40).to_bytes(8, "little") + b"{}", "header length"),
        ((100).to_bytes(8, "little") + b"{}", "cut: 10 bytes, the header alone is 108"),
        (_raw(b"{" + b'"a":[' * 400_000), "describes more than"),
        (_raw(b'{"a":' * 50_000), "is not JSON"),
        (_raw(b"[]"), "not an object"),
        (_raw(b"\xff\xfe"), "is not JSON"),
        (_raw(b'{"__metadata__":{},"__metadata__":{}}'), "twice"),
        (_raw(b'{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x"), "no saved branch"),
        (_raw(b'{"__metadata__":"x"}'), "no saved branch"),
        (_raw(b'{"a":' + b"9" * 5000 + b"}"), "is not JSON"),
    ],
)
def test_foreign_files(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "foreign"
    path.write_bytes(data)
    with pytest.raises(SavedBranchError, match=message):
        SavedFile(path)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "U8", "shape": [4], "data_offsets": [0, 5]}, "not the size of its shape"),
        ({"dtype": "U8", "shape": [-4], "data_offsets": [0, 4]}, "no proper shape"),
        ({"dtype": "U8", "shape": [1 << 70], "data_offsets": [0, 4]}, "no proper shape"),
        ({"dtype": "U8", "shape": [True], "data_offsets": [0, 1]}, "no proper shape"),
        ({"dtype": "U8", "shape": [1.0], "data_offsets": [0, 1]}, "no proper shape"),
        ({"dtype": "U8", "shape": [1] * 100, "data_offsets": [0, 1]}, "no proper shape"),
        ({"dtype": "U8", "shape": [1], "data_offsets": [3, 4]}, "begins at 3, not at 0"),
        ({"dtype": "U8", "shape": [1], "data_offsets": [1, 0]}, "not the size of its shape"),
        ({"dtype": "U8", "shape": [1 << 59], "data_offsets": [0, 1 << 59]}, "cut"),
        ({"dtype": "O", "shape": [1], "data_offsets": [0, 1]}, "dtype 'O'"),
        ({"dtype": 7, "shape": [1], "data_offsets": [0, 1]}, "dtype 7"),
        ({"dtype": "U8", "shape": [1]}, "not described by"),
        ("x", "not described by"),
    ],
)
def test_tensors_that_cannot_be(tmp_path: Path, entry: Any, message: str) -> None:
    meta = {**layout.metadata(1, 0, 6, "", SHAPE), "digest": "0" * 64}
    header = json.dumps({"__metadata__": meta, "seeds": entry}).encode()
    path = tmp_path / "b"
    path.write_bytes(_raw(header, b"xxxx"))
    with pytest.raises(SavedBranchError, match=message):
        SavedFile(path)


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, message in (
        (tmp_path / "nothing", "No such file"),
        (tmp_path, "it is a folder"),
        (tmp_path / "pipe", "no regular file"),
        (Path("/dev/zero"), "no regular file"),
        (tmp_path / ("x" * 300), "too long"),
    ):
        with pytest.raises(SavedBranchError, match=message):
            SavedFile(path)


# ---- other readers, limits -----------------------------------------------------------------------


def test_the_safetensors_library_reads_it(sample: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file

    file = SavedFile(sample)
    tensors = load_file(sample)
    chunk = file.chunks[0]
    kv = tensors[chunk.name]
    assert kv.shape == (2, 2, chunk.num_tokens, 1, 2)
    record = file.read_kv(chunk.branch, chunk.start, chunk.start + chunk.num_tokens)
    assert np.array_equal(kv.view(-1).view(dtype=_uint8()).numpy(), record)
    tokens = [token for branch in file.branches for token in branch.tokens.tolist()]
    assert tensors["tokens"].tolist() == tokens
    with safe_open(sample, "np") as opened:
        assert opened.metadata()["format"] == layout.FORMAT
        assert opened.metadata()["fingerprint"] == "a model"


def _uint8() -> Any:
    import torch

    return torch.uint8


def test_what_a_file_cannot_hold_is_refused_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    branch = SavedBranch(*_tokens(300))
    for name, value, message in (
        ("MAX_BRANCHES", 0, "1 branches are more than a saved branch holds, 0"),
        ("MAX_TOKENS", 299, "300 tokens are more"),
        ("MAX_CHUNKS", 4, "5 chunks of 64 tokens of KV are more"),
        ("MAX_NOTES", 5, "6 bytes of JSON, the most is 5"),
    ):
        monkeypatch.setattr(layout, name, value)
        planned = list(chunks_of(0, 0, 300))
        with pytest.raises(InvalidRequestError, match=message):
            SavedWriter(tmp_path / "b", [branch], planned=planned, shape=SHAPE, fingerprint="")
        monkeypatch.undo()
    with pytest.raises(InvalidRequestError, match="fingerprint has 2000 characters"):
        write(tmp_path / "b", [branch], [], shape=SHAPE, fingerprint="x" * 2000)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": (1, 2)}, r"metadata of branch 0\['a'\] is of type tuple"),
        ({"a": [1, {2}]}, r"\['a'\]\[1\] is of type set"),
        ({1: "x"}, "the key 1 of metadata of branch 0"),
        ({"a": float("nan")}, "is nan"),
        ({"a": float("-inf")}, "is -inf"),
        ({"a": b"x"}, "type bytes"),
        ({"a": 1 << 5000}, "more than 4,096 bits"),
        ({"a": np.float64(1)}, "of type float64"),
    ],
)
def test_metadata_that_json_would_change_is_refused(
    tmp_path: Path, value: dict[Any, Any], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        write(
            tmp_path / "b",
            [SavedBranch(*_tokens(1), metadata=value)],
            [],
            shape=SHAPE,
            fingerprint="",
        )
    assert os.listdir(tmp_path) == []


def test_deep_metadata(tmp_path: Path) -> None:
    def nested(depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for _ in range(depth - 1):
            found = {"a": found}
        return found

    branch = SavedBranch(*_tokens(1), metadata=nested(layout.MAX_DEPTH))
    write(tmp_path / "b", [branch], [], shape=SHAPE, fingerprint="")
    assert SavedFile(tmp_path / "b").branches[0].metadata == nested(layout.MAX_DEPTH)
    deep = SavedBranch(*_tokens(1), metadata=nested(layout.MAX_DEPTH + 1))
    with pytest.raises(InvalidRequestError, match="nested more than 64 deep"):
        write(tmp_path / "c", [deep], [], shape=SHAPE, fingerprint="")


def test_chunks_are_cut_at_multiples() -> None:
    assert list(chunks_of(3, 60, 130)) == [Chunk(3, 60, 4), Chunk(3, 64, 64), Chunk(3, 128, 2)]
    assert list(chunks_of(0, 5, 5)) == []


def test_no_torch_is_needed(tmp_path: Path) -> None:
    program = f"""
import sys
import numpy as np
from cotrt.saved.layout import SavedBranch
from cotrt.saved.reader import SavedFile
from cotrt.saved.writer import write
from cotrt.plan import KVShape
branch = SavedBranch(np.arange(5, dtype=np.int32), np.full(5, np.nan), np.zeros(5, np.uint8))
write({str(tmp_path / "b")!r}, [branch], [], shape=KVShape(1, 2, 1, 2, "float16"), fingerprint="")
SavedFile({str(tmp_path / "b")!r})
assert not {{"torch", "transformers", "safetensors", "pydantic"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
